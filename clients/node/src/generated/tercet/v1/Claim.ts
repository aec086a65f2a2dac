// Original file: ../../protos/tercet/v1/executor.proto

import type { SchemaRevision as _tercet_v1_SchemaRevision, SchemaRevision__Output as _tercet_v1_SchemaRevision__Output } from '../../tercet/v1/SchemaRevision.js';

export interface Claim {
  'schedulerId'?: (string);
  'takeover'?: (boolean);
  'modelHash'?: (string);
  'schemaRevision'?: (_tercet_v1_SchemaRevision);
}

export interface Claim__Output {
  'schedulerId'?: (string);
  'takeover'?: (boolean);
  'modelHash'?: (string);
  'schemaRevision'?: (_tercet_v1_SchemaRevision__Output);
}
