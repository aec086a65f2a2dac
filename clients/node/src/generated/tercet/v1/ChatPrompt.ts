// Original file: ../../protos/tercet/v1/tokenizer.proto

import type { ChatMessage as _tercet_v1_ChatMessage, ChatMessage__Output as _tercet_v1_ChatMessage__Output } from '../../tercet/v1/ChatMessage.js';

export interface ChatPrompt {
  'messages'?: (_tercet_v1_ChatMessage)[];
  'addGenerationPrompt'?: (boolean);
  'toolsJson'?: (string)[];
  '_addGenerationPrompt'?: "addGenerationPrompt";
}

export interface ChatPrompt__Output {
  'messages'?: (_tercet_v1_ChatMessage__Output)[];
  'addGenerationPrompt'?: (boolean);
  'toolsJson'?: (string)[];
  '_addGenerationPrompt'?: "addGenerationPrompt";
}
