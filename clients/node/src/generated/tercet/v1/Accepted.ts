// Original file: ../../protos/tercet/v1/tokenizer.proto

import type { TimeLimits as _tercet_v1_TimeLimits, TimeLimits__Output as _tercet_v1_TimeLimits__Output } from '../../tercet/v1/TimeLimits.js';
import type { Long } from '@grpc/proto-loader';

export interface Accepted {
  'requestId'?: (string);
  'queuePosition'?: (number);
  'seed'?: (number | string | Long);
  'limits'?: (_tercet_v1_TimeLimits | null);
  'maxTokens'?: (number);
  'promptTokens'?: (number);
  'promptIds'?: (number)[];
  'numerics'?: (string);
  'model'?: (string);
  'n'?: (number);
}

export interface Accepted__Output {
  'requestId'?: (string);
  'queuePosition'?: (number);
  'seed'?: (string);
  'limits'?: (_tercet_v1_TimeLimits__Output);
  'maxTokens'?: (number);
  'promptTokens'?: (number);
  'promptIds'?: (number)[];
  'numerics'?: (string);
  'model'?: (string);
  'n'?: (number);
}
