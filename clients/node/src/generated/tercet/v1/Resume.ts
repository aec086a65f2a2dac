// Original file: ../../protos/tercet/v1/common.proto

import type { ResumedAnswer as _tercet_v1_ResumedAnswer, ResumedAnswer__Output as _tercet_v1_ResumedAnswer__Output } from '../../tercet/v1/ResumedAnswer.js';
import type { Long } from '@grpc/proto-loader';

export interface Resume {
  'promptIds'?: (number)[];
  'outputIds'?: (number)[];
  'charsDelivered'?: (number | string | Long);
  'numerics'?: (string);
  'finished'?: (boolean);
  'others'?: (_tercet_v1_ResumedAnswer)[];
}

export interface Resume__Output {
  'promptIds'?: (number)[];
  'outputIds'?: (number)[];
  'charsDelivered'?: (string);
  'numerics'?: (string);
  'finished'?: (boolean);
  'others'?: (_tercet_v1_ResumedAnswer__Output)[];
}
