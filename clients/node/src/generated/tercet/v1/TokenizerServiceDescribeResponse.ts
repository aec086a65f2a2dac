// Original file: ../../protos/tercet/v1/tokenizer.proto

import type { ModelDescription as _tercet_v1_ModelDescription, ModelDescription__Output as _tercet_v1_ModelDescription__Output } from '../../tercet/v1/ModelDescription.js';
import type { SchemaRevision as _tercet_v1_SchemaRevision, SchemaRevision__Output as _tercet_v1_SchemaRevision__Output } from '../../tercet/v1/SchemaRevision.js';

export interface TokenizerServiceDescribeResponse {
  'model'?: (_tercet_v1_ModelDescription | null);
  'schemaRevision'?: (_tercet_v1_SchemaRevision);
  'numerics'?: (string);
  'hasChatTemplate'?: (boolean);
  'configHash'?: (string);
  'toolFormat'?: (string);
  'reasoningFormat'?: (string);
}

export interface TokenizerServiceDescribeResponse__Output {
  'model'?: (_tercet_v1_ModelDescription__Output);
  'schemaRevision'?: (_tercet_v1_SchemaRevision__Output);
  'numerics'?: (string);
  'hasChatTemplate'?: (boolean);
  'configHash'?: (string);
  'toolFormat'?: (string);
  'reasoningFormat'?: (string);
}
