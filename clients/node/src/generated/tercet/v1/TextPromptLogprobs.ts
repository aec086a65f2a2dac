// Original file: ../../protos/tercet/v1/tokenizer.proto

import type { TextLogprobs as _tercet_v1_TextLogprobs, TextLogprobs__Output as _tercet_v1_TextLogprobs__Output } from '../../tercet/v1/TextLogprobs.js';
import type { TextLogprob as _tercet_v1_TextLogprob, TextLogprob__Output as _tercet_v1_TextLogprob__Output } from '../../tercet/v1/TextLogprob.js';

export interface TextPromptLogprobs {
  'logprobs'?: (_tercet_v1_TextLogprobs)[];
  'first'?: (_tercet_v1_TextLogprob | null);
}

export interface TextPromptLogprobs__Output {
  'logprobs'?: (_tercet_v1_TextLogprobs__Output)[];
  'first'?: (_tercet_v1_TextLogprob__Output);
}
