// Original file: ../../protos/tercet/v1/common.proto


export interface CacheControl {
  'salt'?: (string);
  'bypass'?: (boolean);
  '_salt'?: "salt";
  '_bypass'?: "bypass";
}

export interface CacheControl__Output {
  'salt'?: (string);
  'bypass'?: (boolean);
  '_salt'?: "salt";
  '_bypass'?: "bypass";
}
