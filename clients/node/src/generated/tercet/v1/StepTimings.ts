// Original file: ../../protos/tercet/v1/executor.proto

import type { Long } from '@grpc/proto-loader';

export interface StepTimings {
  'waitNs'?: (number | string | Long);
  'prepareNs'?: (number | string | Long);
  'forwardNs'?: (number | string | Long);
  'sampleNs'?: (number | string | Long);
}

export interface StepTimings__Output {
  'waitNs'?: (string);
  'prepareNs'?: (string);
  'forwardNs'?: (string);
  'sampleNs'?: (string);
}
