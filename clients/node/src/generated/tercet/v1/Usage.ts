// Original file: ../../protos/tercet/v1/common.proto


export interface Usage {
  'promptTokens'?: (number);
  'cachedTokens'?: (number);
  'deliveredTokens'?: (number);
  'sampledTokens'?: (number);
  'discardedTokens'?: (number);
  'preemptions'?: (number);
  'recomputedTokens'?: (number);
}

export interface Usage__Output {
  'promptTokens'?: (number);
  'cachedTokens'?: (number);
  'deliveredTokens'?: (number);
  'sampledTokens'?: (number);
  'discardedTokens'?: (number);
  'preemptions'?: (number);
  'recomputedTokens'?: (number);
}
