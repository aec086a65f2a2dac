// Original file: ../../protos/tercet/v1/tokenizer.proto


export interface ChatMessage {
  'role'?: (string);
  'content'?: (string);
  'name'?: (string);
  'toolCallsJson'?: (string);
  'toolCallId'?: (string);
  '_name'?: "name";
  '_toolCallsJson'?: "toolCallsJson";
  '_toolCallId'?: "toolCallId";
}

export interface ChatMessage__Output {
  'role'?: (string);
  'content'?: (string);
  'name'?: (string);
  'toolCallsJson'?: (string);
  'toolCallId'?: (string);
  '_name'?: "name";
  '_toolCallsJson'?: "toolCallsJson";
  '_toolCallId'?: "toolCallId";
}
