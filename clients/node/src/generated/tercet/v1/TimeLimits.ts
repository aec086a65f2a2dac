// Original file: ../../protos/tercet/v1/common.proto

import type { Long } from '@grpc/proto-loader';

export interface TimeLimits {
  'queueNs'?: (number | string | Long);
  'firstTokenNs'?: (number | string | Long);
  'betweenTokensNs'?: (number | string | Long);
  'totalNs'?: (number | string | Long);
  '_queueNs'?: "queueNs";
  '_firstTokenNs'?: "firstTokenNs";
  '_betweenTokensNs'?: "betweenTokensNs";
  '_totalNs'?: "totalNs";
}

export interface TimeLimits__Output {
  'queueNs'?: (string);
  'firstTokenNs'?: (string);
  'betweenTokensNs'?: (string);
  'totalNs'?: (string);
  '_queueNs'?: "queueNs";
  '_firstTokenNs'?: "firstTokenNs";
  '_betweenTokensNs'?: "betweenTokensNs";
  '_totalNs'?: "totalNs";
}
