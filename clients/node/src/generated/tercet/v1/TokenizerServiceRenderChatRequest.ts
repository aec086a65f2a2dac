// Original file: ../../protos/tercet/v1/tokenizer.proto

import type { ChatPrompt as _tercet_v1_ChatPrompt, ChatPrompt__Output as _tercet_v1_ChatPrompt__Output } from '../../tercet/v1/ChatPrompt.js';

export interface TokenizerServiceRenderChatRequest {
  'chat'?: (_tercet_v1_ChatPrompt | null);
}

export interface TokenizerServiceRenderChatRequest__Output {
  'chat'?: (_tercet_v1_ChatPrompt__Output);
}
