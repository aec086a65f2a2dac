// Original file: ../../protos/tercet/v1/executor.proto

import type { Long } from '@grpc/proto-loader';

export interface Heartbeat {
  'stepId'?: (number | string | Long);
  'runningNs'?: (number | string | Long);
  'queuedSteps'?: (number);
}

export interface Heartbeat__Output {
  'stepId'?: (string);
  'runningNs'?: (string);
  'queuedSteps'?: (number);
}
