// Original file: ../../protos/tercet/v1/executor.proto

import type { TokenLogprobs as _tercet_v1_TokenLogprobs, TokenLogprobs__Output as _tercet_v1_TokenLogprobs__Output } from '../../tercet/v1/TokenLogprobs.js';
import type { SliceError as _tercet_v1_SliceError, SliceError__Output as _tercet_v1_SliceError__Output } from '../../tercet/v1/SliceError.js';

export interface SliceResult {
  'slot'?: (number);
  'tokenIds'?: (number)[];
  'logprobs'?: (_tercet_v1_TokenLogprobs)[];
  'error'?: (_tercet_v1_SliceError | null);
  'promptLogprobs'?: (_tercet_v1_TokenLogprobs)[];
}

export interface SliceResult__Output {
  'slot'?: (number);
  'tokenIds'?: (number)[];
  'logprobs'?: (_tercet_v1_TokenLogprobs__Output)[];
  'error'?: (_tercet_v1_SliceError__Output);
  'promptLogprobs'?: (_tercet_v1_TokenLogprobs__Output)[];
}
