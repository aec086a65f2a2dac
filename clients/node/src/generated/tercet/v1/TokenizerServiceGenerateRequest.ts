// Original file: ../../protos/tercet/v1/tokenizer.proto

import type { RequestContext as _tercet_v1_RequestContext, RequestContext__Output as _tercet_v1_RequestContext__Output } from '../../tercet/v1/RequestContext.js';
import type { ChatPrompt as _tercet_v1_ChatPrompt, ChatPrompt__Output as _tercet_v1_ChatPrompt__Output } from '../../tercet/v1/ChatPrompt.js';
import type { TokenIds as _tercet_v1_TokenIds, TokenIds__Output as _tercet_v1_TokenIds__Output } from '../../tercet/v1/TokenIds.js';
import type { SamplingParams as _tercet_v1_SamplingParams, SamplingParams__Output as _tercet_v1_SamplingParams__Output } from '../../tercet/v1/SamplingParams.js';
import type { TimeLimits as _tercet_v1_TimeLimits, TimeLimits__Output as _tercet_v1_TimeLimits__Output } from '../../tercet/v1/TimeLimits.js';
import type { CacheControl as _tercet_v1_CacheControl, CacheControl__Output as _tercet_v1_CacheControl__Output } from '../../tercet/v1/CacheControl.js';
import type { Resume as _tercet_v1_Resume, Resume__Output as _tercet_v1_Resume__Output } from '../../tercet/v1/Resume.js';

export interface TokenizerServiceGenerateRequest {
  'context'?: (_tercet_v1_RequestContext | null);
  'text'?: (string);
  'chat'?: (_tercet_v1_ChatPrompt | null);
  'tokenIds'?: (_tercet_v1_TokenIds | null);
  'sampling'?: (_tercet_v1_SamplingParams | null);
  'limits'?: (_tercet_v1_TimeLimits | null);
  'stop'?: (string)[];
  'includeStop'?: (boolean);
  'keepSpecialTokens'?: (boolean);
  'cache'?: (_tercet_v1_CacheControl | null);
  'resume'?: (_tercet_v1_Resume | null);
  'echo'?: (boolean);
  'returnPromptIds'?: (boolean);
  'model'?: (string);
  'prompt'?: "text"|"chat"|"tokenIds";
  '_includeStop'?: "includeStop";
  '_keepSpecialTokens'?: "keepSpecialTokens";
  '_echo'?: "echo";
  '_returnPromptIds'?: "returnPromptIds";
  '_model'?: "model";
}

export interface TokenizerServiceGenerateRequest__Output {
  'context'?: (_tercet_v1_RequestContext__Output);
  'text'?: (string);
  'chat'?: (_tercet_v1_ChatPrompt__Output);
  'tokenIds'?: (_tercet_v1_TokenIds__Output);
  'sampling'?: (_tercet_v1_SamplingParams__Output);
  'limits'?: (_tercet_v1_TimeLimits__Output);
  'stop'?: (string)[];
  'includeStop'?: (boolean);
  'keepSpecialTokens'?: (boolean);
  'cache'?: (_tercet_v1_CacheControl__Output);
  'resume'?: (_tercet_v1_Resume__Output);
  'echo'?: (boolean);
  'returnPromptIds'?: (boolean);
  'model'?: (string);
  'prompt'?: "text"|"chat"|"tokenIds";
  '_includeStop'?: "includeStop";
  '_keepSpecialTokens'?: "keepSpecialTokens";
  '_echo'?: "echo";
  '_returnPromptIds'?: "returnPromptIds";
  '_model'?: "model";
}
