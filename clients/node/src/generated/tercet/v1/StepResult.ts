// Original file: ../../protos/tercet/v1/executor.proto

import type { SliceResult as _tercet_v1_SliceResult, SliceResult__Output as _tercet_v1_SliceResult__Output } from '../../tercet/v1/SliceResult.js';
import type { StepTimings as _tercet_v1_StepTimings, StepTimings__Output as _tercet_v1_StepTimings__Output } from '../../tercet/v1/StepTimings.js';
import type { Long } from '@grpc/proto-loader';

export interface StepResult {
  'stepId'?: (number | string | Long);
  'results'?: (_tercet_v1_SliceResult)[];
  'timings'?: (_tercet_v1_StepTimings | null);
}

export interface StepResult__Output {
  'stepId'?: (string);
  'results'?: (_tercet_v1_SliceResult__Output)[];
  'timings'?: (_tercet_v1_StepTimings__Output);
}
