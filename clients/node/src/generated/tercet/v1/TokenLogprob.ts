// Original file: ../../protos/tercet/v1/common.proto


export interface TokenLogprob {
  'tokenId'?: (number);
  'logprob'?: (number | string);
}

export interface TokenLogprob__Output {
  'tokenId'?: (number);
  'logprob'?: (number);
}
