// Original file: ../../protos/tercet/v1/tokenizer.proto

import type { TextLogprob as _tercet_v1_TextLogprob, TextLogprob__Output as _tercet_v1_TextLogprob__Output } from '../../tercet/v1/TextLogprob.js';

export interface TextLogprobs {
  'drawn'?: (_tercet_v1_TextLogprob | null);
  'top'?: (_tercet_v1_TextLogprob)[];
}

export interface TextLogprobs__Output {
  'drawn'?: (_tercet_v1_TextLogprob__Output);
  'top'?: (_tercet_v1_TextLogprob__Output)[];
}
