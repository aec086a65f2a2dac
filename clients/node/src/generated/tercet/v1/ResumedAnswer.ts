// Original file: ../../protos/tercet/v1/common.proto

import type { Long } from '@grpc/proto-loader';

export interface ResumedAnswer {
  'outputIds'?: (number)[];
  'charsDelivered'?: (number | string | Long);
  'finished'?: (boolean);
}

export interface ResumedAnswer__Output {
  'outputIds'?: (number)[];
  'charsDelivered'?: (string);
  'finished'?: (boolean);
}
