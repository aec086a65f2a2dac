// Original file: ../../protos/tercet/v1/tokenizer.proto

import type { FinishReason as _tercet_v1_FinishReason, FinishReason__Output as _tercet_v1_FinishReason__Output } from '../../tercet/v1/FinishReason.js';
import type { Usage as _tercet_v1_Usage, Usage__Output as _tercet_v1_Usage__Output } from '../../tercet/v1/Usage.js';
import type { PhaseTimes as _tercet_v1_PhaseTimes, PhaseTimes__Output as _tercet_v1_PhaseTimes__Output } from '../../tercet/v1/PhaseTimes.js';
import type { TimeLimitKind as _tercet_v1_TimeLimitKind, TimeLimitKind__Output as _tercet_v1_TimeLimitKind__Output } from '../../tercet/v1/TimeLimitKind.js';

export interface Finished {
  'index'?: (number);
  'reason'?: (_tercet_v1_FinishReason);
  'stopMatch'?: (string);
  'usage'?: (_tercet_v1_Usage | null);
  'times'?: (_tercet_v1_PhaseTimes | null);
  'limit'?: (_tercet_v1_TimeLimitKind);
  '_stopMatch'?: "stopMatch";
}

export interface Finished__Output {
  'index'?: (number);
  'reason'?: (_tercet_v1_FinishReason__Output);
  'stopMatch'?: (string);
  'usage'?: (_tercet_v1_Usage__Output);
  'times'?: (_tercet_v1_PhaseTimes__Output);
  'limit'?: (_tercet_v1_TimeLimitKind__Output);
  '_stopMatch'?: "stopMatch";
}
