// Original file: ../../protos/tercet/v1/tokenizer.proto


export interface TokenizerServiceDetokenizeRequest {
  'tokenIds'?: (number)[];
  'keepSpecialTokens'?: (boolean);
  '_keepSpecialTokens'?: "keepSpecialTokens";
}

export interface TokenizerServiceDetokenizeRequest__Output {
  'tokenIds'?: (number)[];
  'keepSpecialTokens'?: (boolean);
  '_keepSpecialTokens'?: "keepSpecialTokens";
}
