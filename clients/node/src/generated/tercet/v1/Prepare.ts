// Original file: ../../protos/tercet/v1/executor.proto

import type { Grammar as _tercet_v1_Grammar, Grammar__Output as _tercet_v1_Grammar__Output } from '../../tercet/v1/Grammar.js';
import type { Long } from '@grpc/proto-loader';

export interface Prepare {
  'prepareId'?: (number | string | Long);
  'grammar'?: (_tercet_v1_Grammar | null);
}

export interface Prepare__Output {
  'prepareId'?: (string);
  'grammar'?: (_tercet_v1_Grammar__Output);
}
