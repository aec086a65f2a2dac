// Original file: ../../protos/tercet/v1/executor.proto

import type { Long } from '@grpc/proto-loader';

export interface Prepared {
  'prepareId'?: (number | string | Long);
  'problem'?: (string);
  'busy'?: (boolean);
}

export interface Prepared__Output {
  'prepareId'?: (string);
  'problem'?: (string);
  'busy'?: (boolean);
}
