// Original file: ../../protos/tercet/v1/tokenizer.proto

import type { TextLogprobs as _tercet_v1_TextLogprobs, TextLogprobs__Output as _tercet_v1_TextLogprobs__Output } from '../../tercet/v1/TextLogprobs.js';

export interface TextPromptLogprobs {
  'logprobs'?: (_tercet_v1_TextLogprobs)[];
}

export interface TextPromptLogprobs__Output {
  'logprobs'?: (_tercet_v1_TextLogprobs__Output)[];
}
