// Original file: ../../protos/tercet/v1/tokenizer.proto


export interface TokenizerServiceGetTokenizerRequest {
}

export interface TokenizerServiceGetTokenizerRequest__Output {
}
