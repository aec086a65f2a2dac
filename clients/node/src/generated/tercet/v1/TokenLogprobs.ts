// Original file: ../../protos/tercet/v1/common.proto

import type { TokenLogprob as _tercet_v1_TokenLogprob, TokenLogprob__Output as _tercet_v1_TokenLogprob__Output } from '../../tercet/v1/TokenLogprob.js';

export interface TokenLogprobs {
  'drawn'?: (number | string);
  'top'?: (_tercet_v1_TokenLogprob)[];
}

export interface TokenLogprobs__Output {
  'drawn'?: (number);
  'top'?: (_tercet_v1_TokenLogprob__Output)[];
}
