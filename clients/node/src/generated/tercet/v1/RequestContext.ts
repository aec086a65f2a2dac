// Original file: ../../protos/tercet/v1/common.proto


export interface RequestContext {
  'requestId'?: (string);
  'tenant'?: (string);
  'priority'?: (number);
  'attempt'?: (number);
  '_requestId'?: "requestId";
  '_tenant'?: "tenant";
  '_priority'?: "priority";
  '_attempt'?: "attempt";
}

export interface RequestContext__Output {
  'requestId'?: (string);
  'tenant'?: (string);
  'priority'?: (number);
  'attempt'?: (number);
  '_requestId'?: "requestId";
  '_tenant'?: "tenant";
  '_priority'?: "priority";
  '_attempt'?: "attempt";
}
