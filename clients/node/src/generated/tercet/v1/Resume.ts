// Original file: ../../protos/tercet/v1/common.proto

import type { Long } from '@grpc/proto-loader';

export interface Resume {
  'promptIds'?: (number)[];
  'outputIds'?: (number)[];
  'charsDelivered'?: (number | string | Long);
  'numerics'?: (string);
}

export interface Resume__Output {
  'promptIds'?: (number)[];
  'outputIds'?: (number)[];
  'charsDelivered'?: (string);
  'numerics'?: (string);
}
