// Original file: ../../protos/tercet/v1/executor.proto

import type { ModelDescription as _tercet_v1_ModelDescription, ModelDescription__Output as _tercet_v1_ModelDescription__Output } from '../../tercet/v1/ModelDescription.js';
import type { SchemaRevision as _tercet_v1_SchemaRevision, SchemaRevision__Output as _tercet_v1_SchemaRevision__Output } from '../../tercet/v1/SchemaRevision.js';
import type { ExecutorCapability as _tercet_v1_ExecutorCapability, ExecutorCapability__Output as _tercet_v1_ExecutorCapability__Output } from '../../tercet/v1/ExecutorCapability.js';
import type { Long } from '@grpc/proto-loader';

export interface ExecutorServiceDescribeResponse {
  'model'?: (_tercet_v1_ModelDescription | null);
  'schemaRevision'?: (_tercet_v1_SchemaRevision);
  'numerics'?: (string);
  'blockSize'?: (number);
  'totalBlocks'?: (number);
  'maxBatchedTokens'?: (number);
  'maxSequences'?: (number);
  'capabilities'?: (_tercet_v1_ExecutorCapability)[];
  'backend'?: (string);
  'instanceId'?: (string);
  'weightBytes'?: (number | string | Long);
  'kvBytes'?: (number | string | Long);
  'configHash'?: (string);
  'kvFormat'?: (string);
}

export interface ExecutorServiceDescribeResponse__Output {
  'model'?: (_tercet_v1_ModelDescription__Output);
  'schemaRevision'?: (_tercet_v1_SchemaRevision__Output);
  'numerics'?: (string);
  'blockSize'?: (number);
  'totalBlocks'?: (number);
  'maxBatchedTokens'?: (number);
  'maxSequences'?: (number);
  'capabilities'?: (_tercet_v1_ExecutorCapability__Output)[];
  'backend'?: (string);
  'instanceId'?: (string);
  'weightBytes'?: (string);
  'kvBytes'?: (string);
  'configHash'?: (string);
  'kvFormat'?: (string);
}
