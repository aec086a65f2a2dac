// Original file: ../../protos/tercet/v1/tokenizer.proto


export interface TokenizerServiceDescribeRequest {
}

export interface TokenizerServiceDescribeRequest__Output {
}
