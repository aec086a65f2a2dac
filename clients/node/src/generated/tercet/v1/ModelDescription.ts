// Original file: ../../protos/tercet/v1/common.proto


export interface ModelDescription {
  'name'?: (string);
  'modelHash'?: (string);
  'tokenizerHash'?: (string);
  'maxModelLen'?: (number);
  'vocabSize'?: (number);
  'eosTokenIds'?: (number)[];
}

export interface ModelDescription__Output {
  'name'?: (string);
  'modelHash'?: (string);
  'tokenizerHash'?: (string);
  'maxModelLen'?: (number);
  'vocabSize'?: (number);
  'eosTokenIds'?: (number)[];
}
