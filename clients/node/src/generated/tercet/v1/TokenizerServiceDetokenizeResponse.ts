// Original file: ../../protos/tercet/v1/tokenizer.proto


export interface TokenizerServiceDetokenizeResponse {
  'text'?: (string);
}

export interface TokenizerServiceDetokenizeResponse__Output {
  'text'?: (string);
}
