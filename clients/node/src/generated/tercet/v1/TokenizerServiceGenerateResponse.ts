// Original file: ../../protos/tercet/v1/tokenizer.proto

import type { Accepted as _tercet_v1_Accepted, Accepted__Output as _tercet_v1_Accepted__Output } from '../../tercet/v1/Accepted.js';
import type { TextDelta as _tercet_v1_TextDelta, TextDelta__Output as _tercet_v1_TextDelta__Output } from '../../tercet/v1/TextDelta.js';
import type { Finished as _tercet_v1_Finished, Finished__Output as _tercet_v1_Finished__Output } from '../../tercet/v1/Finished.js';
import type { TextPromptLogprobs as _tercet_v1_TextPromptLogprobs, TextPromptLogprobs__Output as _tercet_v1_TextPromptLogprobs__Output } from '../../tercet/v1/TextPromptLogprobs.js';

export interface TokenizerServiceGenerateResponse {
  'accepted'?: (_tercet_v1_Accepted | null);
  'delta'?: (_tercet_v1_TextDelta | null);
  'finished'?: (_tercet_v1_Finished | null);
  'promptLogprobs'?: (_tercet_v1_TextPromptLogprobs | null);
  'event'?: "accepted"|"delta"|"finished"|"promptLogprobs";
}

export interface TokenizerServiceGenerateResponse__Output {
  'accepted'?: (_tercet_v1_Accepted__Output);
  'delta'?: (_tercet_v1_TextDelta__Output);
  'finished'?: (_tercet_v1_Finished__Output);
  'promptLogprobs'?: (_tercet_v1_TextPromptLogprobs__Output);
  'event'?: "accepted"|"delta"|"finished"|"promptLogprobs";
}
