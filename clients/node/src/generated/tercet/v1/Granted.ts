// Original file: ../../protos/tercet/v1/executor.proto

import type { Long } from '@grpc/proto-loader';

export interface Granted {
  'instanceId'?: (string);
  'epoch'?: (number | string | Long);
}

export interface Granted__Output {
  'instanceId'?: (string);
  'epoch'?: (string);
}
