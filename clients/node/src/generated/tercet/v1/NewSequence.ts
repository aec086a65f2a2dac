// Original file: ../../protos/tercet/v1/executor.proto

import type { SamplingParams as _tercet_v1_SamplingParams, SamplingParams__Output as _tercet_v1_SamplingParams__Output } from '../../tercet/v1/SamplingParams.js';

export interface NewSequence {
  'sampling'?: (_tercet_v1_SamplingParams | null);
  'promptLen'?: (number);
  'choice'?: (number);
  'traceparent'?: (string);
  'requestId'?: (string);
  'cachedTokenIds'?: (number)[];
  '_traceparent'?: "traceparent";
}

export interface NewSequence__Output {
  'sampling'?: (_tercet_v1_SamplingParams__Output);
  'promptLen'?: (number);
  'choice'?: (number);
  'traceparent'?: (string);
  'requestId'?: (string);
  'cachedTokenIds'?: (number)[];
  '_traceparent'?: "traceparent";
}
