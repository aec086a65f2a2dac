// Original file: ../../protos/tercet/v1/common.proto

import type { Long } from '@grpc/proto-loader';

export interface PhaseTimes {
  'tokenizeNs'?: (number | string | Long);
  'queueNs'?: (number | string | Long);
  'prefillNs'?: (number | string | Long);
  'decodeNs'?: (number | string | Long);
  'firstTokenNs'?: (number | string | Long);
  'totalNs'?: (number | string | Long);
}

export interface PhaseTimes__Output {
  'tokenizeNs'?: (string);
  'queueNs'?: (string);
  'prefillNs'?: (string);
  'decodeNs'?: (string);
  'firstTokenNs'?: (string);
  'totalNs'?: (string);
}
