// Original file: ../../protos/tercet/v1/tokenizer.proto


export interface TokenizerServiceGetTokenizerResponse {
  'chunk'?: (Buffer | Uint8Array | string);
  'sha256'?: (string);
  '_sha256'?: "sha256";
}

export interface TokenizerServiceGetTokenizerResponse__Output {
  'chunk'?: (Buffer);
  'sha256'?: (string);
  '_sha256'?: "sha256";
}
