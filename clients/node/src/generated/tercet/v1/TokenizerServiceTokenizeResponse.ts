// Original file: ../../protos/tercet/v1/tokenizer.proto


export interface TokenizerServiceTokenizeResponse {
  'tokenIds'?: (number)[];
  'pieces'?: (Buffer | Uint8Array | string)[];
}

export interface TokenizerServiceTokenizeResponse__Output {
  'tokenIds'?: (number)[];
  'pieces'?: (Buffer)[];
}
