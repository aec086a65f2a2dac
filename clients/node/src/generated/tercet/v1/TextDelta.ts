// Original file: ../../protos/tercet/v1/tokenizer.proto

import type { TextLogprobs as _tercet_v1_TextLogprobs, TextLogprobs__Output as _tercet_v1_TextLogprobs__Output } from '../../tercet/v1/TextLogprobs.js';

export interface TextDelta {
  'index'?: (number);
  'text'?: (string);
  'tokenIds'?: (number)[];
  'logprobs'?: (_tercet_v1_TextLogprobs)[];
}

export interface TextDelta__Output {
  'index'?: (number);
  'text'?: (string);
  'tokenIds'?: (number)[];
  'logprobs'?: (_tercet_v1_TextLogprobs__Output)[];
}
