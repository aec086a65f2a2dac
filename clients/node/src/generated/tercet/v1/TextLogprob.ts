// Original file: ../../protos/tercet/v1/tokenizer.proto


export interface TextLogprob {
  'tokenId'?: (number);
  'logprob'?: (number | string);
  'text'?: (string);
  'bytes'?: (Buffer | Uint8Array | string);
}

export interface TextLogprob__Output {
  'tokenId'?: (number);
  'logprob'?: (number);
  'text'?: (string);
  'bytes'?: (Buffer);
}
