// Original file: ../../protos/tercet/v1/executor.proto

import type { NewSequence as _tercet_v1_NewSequence, NewSequence__Output as _tercet_v1_NewSequence__Output } from '../../tercet/v1/NewSequence.js';

export interface Slice {
  'slot'?: (number);
  'start'?: (number);
  'count'?: (number);
  'tokenIds'?: (number)[];
  'newBlockIds'?: (number)[];
  'samples'?: (boolean);
  'newSequence'?: (_tercet_v1_NewSequence | null);
  'draftTokenIds'?: (number)[];
}

export interface Slice__Output {
  'slot'?: (number);
  'start'?: (number);
  'count'?: (number);
  'tokenIds'?: (number)[];
  'newBlockIds'?: (number)[];
  'samples'?: (boolean);
  'newSequence'?: (_tercet_v1_NewSequence__Output);
  'draftTokenIds'?: (number)[];
}
