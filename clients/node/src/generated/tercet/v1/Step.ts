// Original file: ../../protos/tercet/v1/executor.proto

import type { Slice as _tercet_v1_Slice, Slice__Output as _tercet_v1_Slice__Output } from '../../tercet/v1/Slice.js';
import type { Long } from '@grpc/proto-loader';

export interface Step {
  'stepId'?: (number | string | Long);
  'epoch'?: (number | string | Long);
  'slices'?: (_tercet_v1_Slice)[];
  'predictedNs'?: (number | string | Long);
  'traceparent'?: (string);
  '_predictedNs'?: "predictedNs";
  '_traceparent'?: "traceparent";
}

export interface Step__Output {
  'stepId'?: (string);
  'epoch'?: (string);
  'slices'?: (_tercet_v1_Slice__Output)[];
  'predictedNs'?: (string);
  'traceparent'?: (string);
  '_predictedNs'?: "predictedNs";
  '_traceparent'?: "traceparent";
}
