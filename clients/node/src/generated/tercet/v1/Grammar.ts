// Original file: ../../protos/tercet/v1/common.proto

import type { GrammarKind as _tercet_v1_GrammarKind, GrammarKind__Output as _tercet_v1_GrammarKind__Output } from '../../tercet/v1/GrammarKind.js';

export interface Grammar {
  'kind'?: (_tercet_v1_GrammarKind);
  'source'?: (string);
}

export interface Grammar__Output {
  'kind'?: (_tercet_v1_GrammarKind__Output);
  'source'?: (string);
}
