// Original file: ../../protos/tercet/v1/tokenizer.proto


export interface TokenizerServiceRenderChatResponse {
  'text'?: (string);
  'tokenIds'?: (number)[];
}

export interface TokenizerServiceRenderChatResponse__Output {
  'text'?: (string);
  'tokenIds'?: (number)[];
}
