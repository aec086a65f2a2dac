// Original file: ../../protos/tercet/v1/common.proto


export interface LogitBias {
  'tokenId'?: (number);
  'bias'?: (number | string);
}

export interface LogitBias__Output {
  'tokenId'?: (number);
  'bias'?: (number);
}
