// Original file: ../../protos/tercet/v1/tokenizer.proto


export interface TokenIds {
  'ids'?: (number)[];
}

export interface TokenIds__Output {
  'ids'?: (number)[];
}
