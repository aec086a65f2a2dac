// Original file: ../../protos/tercet/v1/tokenizer.proto


export interface TokenizerServiceTokenizeRequest {
  'text'?: (string);
  'addSpecialTokens'?: (boolean);
  'returnPieces'?: (boolean);
  '_addSpecialTokens'?: "addSpecialTokens";
  '_returnPieces'?: "returnPieces";
}

export interface TokenizerServiceTokenizeRequest__Output {
  'text'?: (string);
  'addSpecialTokens'?: (boolean);
  'returnPieces'?: (boolean);
  '_addSpecialTokens'?: "addSpecialTokens";
  '_returnPieces'?: "returnPieces";
}
