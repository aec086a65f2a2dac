// Original file: ../../protos/tercet/v1/tokenizer.proto

import type * as grpc from '@grpc/grpc-js'
import type { MethodDefinition } from '@grpc/proto-loader'
import type { TokenizerServiceDescribeRequest as _tercet_v1_TokenizerServiceDescribeRequest, TokenizerServiceDescribeRequest__Output as _tercet_v1_TokenizerServiceDescribeRequest__Output } from '../../tercet/v1/TokenizerServiceDescribeRequest.js';
import type { TokenizerServiceDescribeResponse as _tercet_v1_TokenizerServiceDescribeResponse, TokenizerServiceDescribeResponse__Output as _tercet_v1_TokenizerServiceDescribeResponse__Output } from '../../tercet/v1/TokenizerServiceDescribeResponse.js';
import type { TokenizerServiceDetokenizeRequest as _tercet_v1_TokenizerServiceDetokenizeRequest, TokenizerServiceDetokenizeRequest__Output as _tercet_v1_TokenizerServiceDetokenizeRequest__Output } from '../../tercet/v1/TokenizerServiceDetokenizeRequest.js';
import type { TokenizerServiceDetokenizeResponse as _tercet_v1_TokenizerServiceDetokenizeResponse, TokenizerServiceDetokenizeResponse__Output as _tercet_v1_TokenizerServiceDetokenizeResponse__Output } from '../../tercet/v1/TokenizerServiceDetokenizeResponse.js';
import type { TokenizerServiceGenerateRequest as _tercet_v1_TokenizerServiceGenerateRequest, TokenizerServiceGenerateRequest__Output as _tercet_v1_TokenizerServiceGenerateRequest__Output } from '../../tercet/v1/TokenizerServiceGenerateRequest.js';
import type { TokenizerServiceGenerateResponse as _tercet_v1_TokenizerServiceGenerateResponse, TokenizerServiceGenerateResponse__Output as _tercet_v1_TokenizerServiceGenerateResponse__Output } from '../../tercet/v1/TokenizerServiceGenerateResponse.js';
import type { TokenizerServiceGetTokenizerRequest as _tercet_v1_TokenizerServiceGetTokenizerRequest, TokenizerServiceGetTokenizerRequest__Output as _tercet_v1_TokenizerServiceGetTokenizerRequest__Output } from '../../tercet/v1/TokenizerServiceGetTokenizerRequest.js';
import type { TokenizerServiceGetTokenizerResponse as _tercet_v1_TokenizerServiceGetTokenizerResponse, TokenizerServiceGetTokenizerResponse__Output as _tercet_v1_TokenizerServiceGetTokenizerResponse__Output } from '../../tercet/v1/TokenizerServiceGetTokenizerResponse.js';
import type { TokenizerServiceRenderChatRequest as _tercet_v1_TokenizerServiceRenderChatRequest, TokenizerServiceRenderChatRequest__Output as _tercet_v1_TokenizerServiceRenderChatRequest__Output } from '../../tercet/v1/TokenizerServiceRenderChatRequest.js';
import type { TokenizerServiceRenderChatResponse as _tercet_v1_TokenizerServiceRenderChatResponse, TokenizerServiceRenderChatResponse__Output as _tercet_v1_TokenizerServiceRenderChatResponse__Output } from '../../tercet/v1/TokenizerServiceRenderChatResponse.js';
import type { TokenizerServiceTokenizeRequest as _tercet_v1_TokenizerServiceTokenizeRequest, TokenizerServiceTokenizeRequest__Output as _tercet_v1_TokenizerServiceTokenizeRequest__Output } from '../../tercet/v1/TokenizerServiceTokenizeRequest.js';
import type { TokenizerServiceTokenizeResponse as _tercet_v1_TokenizerServiceTokenizeResponse, TokenizerServiceTokenizeResponse__Output as _tercet_v1_TokenizerServiceTokenizeResponse__Output } from '../../tercet/v1/TokenizerServiceTokenizeResponse.js';

export interface TokenizerServiceClient extends grpc.Client {
  Describe(argument: _tercet_v1_TokenizerServiceDescribeRequest, metadata: grpc.Metadata, options: grpc.CallOptions, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceDescribeResponse__Output>): grpc.ClientUnaryCall;
  Describe(argument: _tercet_v1_TokenizerServiceDescribeRequest, metadata: grpc.Metadata, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceDescribeResponse__Output>): grpc.ClientUnaryCall;
  Describe(argument: _tercet_v1_TokenizerServiceDescribeRequest, options: grpc.CallOptions, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceDescribeResponse__Output>): grpc.ClientUnaryCall;
  Describe(argument: _tercet_v1_TokenizerServiceDescribeRequest, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceDescribeResponse__Output>): grpc.ClientUnaryCall;
  describe(argument: _tercet_v1_TokenizerServiceDescribeRequest, metadata: grpc.Metadata, options: grpc.CallOptions, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceDescribeResponse__Output>): grpc.ClientUnaryCall;
  describe(argument: _tercet_v1_TokenizerServiceDescribeRequest, metadata: grpc.Metadata, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceDescribeResponse__Output>): grpc.ClientUnaryCall;
  describe(argument: _tercet_v1_TokenizerServiceDescribeRequest, options: grpc.CallOptions, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceDescribeResponse__Output>): grpc.ClientUnaryCall;
  describe(argument: _tercet_v1_TokenizerServiceDescribeRequest, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceDescribeResponse__Output>): grpc.ClientUnaryCall;
  
  Detokenize(argument: _tercet_v1_TokenizerServiceDetokenizeRequest, metadata: grpc.Metadata, options: grpc.CallOptions, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceDetokenizeResponse__Output>): grpc.ClientUnaryCall;
  Detokenize(argument: _tercet_v1_TokenizerServiceDetokenizeRequest, metadata: grpc.Metadata, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceDetokenizeResponse__Output>): grpc.ClientUnaryCall;
  Detokenize(argument: _tercet_v1_TokenizerServiceDetokenizeRequest, options: grpc.CallOptions, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceDetokenizeResponse__Output>): grpc.ClientUnaryCall;
  Detokenize(argument: _tercet_v1_TokenizerServiceDetokenizeRequest, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceDetokenizeResponse__Output>): grpc.ClientUnaryCall;
  detokenize(argument: _tercet_v1_TokenizerServiceDetokenizeRequest, metadata: grpc.Metadata, options: grpc.CallOptions, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceDetokenizeResponse__Output>): grpc.ClientUnaryCall;
  detokenize(argument: _tercet_v1_TokenizerServiceDetokenizeRequest, metadata: grpc.Metadata, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceDetokenizeResponse__Output>): grpc.ClientUnaryCall;
  detokenize(argument: _tercet_v1_TokenizerServiceDetokenizeRequest, options: grpc.CallOptions, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceDetokenizeResponse__Output>): grpc.ClientUnaryCall;
  detokenize(argument: _tercet_v1_TokenizerServiceDetokenizeRequest, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceDetokenizeResponse__Output>): grpc.ClientUnaryCall;
  
  Generate(argument: _tercet_v1_TokenizerServiceGenerateRequest, metadata: grpc.Metadata, options?: grpc.CallOptions): grpc.ClientReadableStream<_tercet_v1_TokenizerServiceGenerateResponse__Output>;
  Generate(argument: _tercet_v1_TokenizerServiceGenerateRequest, options?: grpc.CallOptions): grpc.ClientReadableStream<_tercet_v1_TokenizerServiceGenerateResponse__Output>;
  generate(argument: _tercet_v1_TokenizerServiceGenerateRequest, metadata: grpc.Metadata, options?: grpc.CallOptions): grpc.ClientReadableStream<_tercet_v1_TokenizerServiceGenerateResponse__Output>;
  generate(argument: _tercet_v1_TokenizerServiceGenerateRequest, options?: grpc.CallOptions): grpc.ClientReadableStream<_tercet_v1_TokenizerServiceGenerateResponse__Output>;
  
  GetTokenizer(argument: _tercet_v1_TokenizerServiceGetTokenizerRequest, metadata: grpc.Metadata, options?: grpc.CallOptions): grpc.ClientReadableStream<_tercet_v1_TokenizerServiceGetTokenizerResponse__Output>;
  GetTokenizer(argument: _tercet_v1_TokenizerServiceGetTokenizerRequest, options?: grpc.CallOptions): grpc.ClientReadableStream<_tercet_v1_TokenizerServiceGetTokenizerResponse__Output>;
  getTokenizer(argument: _tercet_v1_TokenizerServiceGetTokenizerRequest, metadata: grpc.Metadata, options?: grpc.CallOptions): grpc.ClientReadableStream<_tercet_v1_TokenizerServiceGetTokenizerResponse__Output>;
  getTokenizer(argument: _tercet_v1_TokenizerServiceGetTokenizerRequest, options?: grpc.CallOptions): grpc.ClientReadableStream<_tercet_v1_TokenizerServiceGetTokenizerResponse__Output>;
  
  RenderChat(argument: _tercet_v1_TokenizerServiceRenderChatRequest, metadata: grpc.Metadata, options: grpc.CallOptions, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceRenderChatResponse__Output>): grpc.ClientUnaryCall;
  RenderChat(argument: _tercet_v1_TokenizerServiceRenderChatRequest, metadata: grpc.Metadata, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceRenderChatResponse__Output>): grpc.ClientUnaryCall;
  RenderChat(argument: _tercet_v1_TokenizerServiceRenderChatRequest, options: grpc.CallOptions, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceRenderChatResponse__Output>): grpc.ClientUnaryCall;
  RenderChat(argument: _tercet_v1_TokenizerServiceRenderChatRequest, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceRenderChatResponse__Output>): grpc.ClientUnaryCall;
  renderChat(argument: _tercet_v1_TokenizerServiceRenderChatRequest, metadata: grpc.Metadata, options: grpc.CallOptions, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceRenderChatResponse__Output>): grpc.ClientUnaryCall;
  renderChat(argument: _tercet_v1_TokenizerServiceRenderChatRequest, metadata: grpc.Metadata, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceRenderChatResponse__Output>): grpc.ClientUnaryCall;
  renderChat(argument: _tercet_v1_TokenizerServiceRenderChatRequest, options: grpc.CallOptions, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceRenderChatResponse__Output>): grpc.ClientUnaryCall;
  renderChat(argument: _tercet_v1_TokenizerServiceRenderChatRequest, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceRenderChatResponse__Output>): grpc.ClientUnaryCall;
  
  Tokenize(argument: _tercet_v1_TokenizerServiceTokenizeRequest, metadata: grpc.Metadata, options: grpc.CallOptions, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceTokenizeResponse__Output>): grpc.ClientUnaryCall;
  Tokenize(argument: _tercet_v1_TokenizerServiceTokenizeRequest, metadata: grpc.Metadata, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceTokenizeResponse__Output>): grpc.ClientUnaryCall;
  Tokenize(argument: _tercet_v1_TokenizerServiceTokenizeRequest, options: grpc.CallOptions, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceTokenizeResponse__Output>): grpc.ClientUnaryCall;
  Tokenize(argument: _tercet_v1_TokenizerServiceTokenizeRequest, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceTokenizeResponse__Output>): grpc.ClientUnaryCall;
  tokenize(argument: _tercet_v1_TokenizerServiceTokenizeRequest, metadata: grpc.Metadata, options: grpc.CallOptions, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceTokenizeResponse__Output>): grpc.ClientUnaryCall;
  tokenize(argument: _tercet_v1_TokenizerServiceTokenizeRequest, metadata: grpc.Metadata, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceTokenizeResponse__Output>): grpc.ClientUnaryCall;
  tokenize(argument: _tercet_v1_TokenizerServiceTokenizeRequest, options: grpc.CallOptions, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceTokenizeResponse__Output>): grpc.ClientUnaryCall;
  tokenize(argument: _tercet_v1_TokenizerServiceTokenizeRequest, callback: grpc.requestCallback<_tercet_v1_TokenizerServiceTokenizeResponse__Output>): grpc.ClientUnaryCall;
  
}

export interface TokenizerServiceHandlers extends grpc.UntypedServiceImplementation {
  Describe: grpc.handleUnaryCall<_tercet_v1_TokenizerServiceDescribeRequest__Output, _tercet_v1_TokenizerServiceDescribeResponse>;
  
  Detokenize: grpc.handleUnaryCall<_tercet_v1_TokenizerServiceDetokenizeRequest__Output, _tercet_v1_TokenizerServiceDetokenizeResponse>;
  
  Generate: grpc.handleServerStreamingCall<_tercet_v1_TokenizerServiceGenerateRequest__Output, _tercet_v1_TokenizerServiceGenerateResponse>;
  
  GetTokenizer: grpc.handleServerStreamingCall<_tercet_v1_TokenizerServiceGetTokenizerRequest__Output, _tercet_v1_TokenizerServiceGetTokenizerResponse>;
  
  RenderChat: grpc.handleUnaryCall<_tercet_v1_TokenizerServiceRenderChatRequest__Output, _tercet_v1_TokenizerServiceRenderChatResponse>;
  
  Tokenize: grpc.handleUnaryCall<_tercet_v1_TokenizerServiceTokenizeRequest__Output, _tercet_v1_TokenizerServiceTokenizeResponse>;
  
}

export interface TokenizerServiceDefinition extends grpc.ServiceDefinition {
  Describe: MethodDefinition<_tercet_v1_TokenizerServiceDescribeRequest, _tercet_v1_TokenizerServiceDescribeResponse, _tercet_v1_TokenizerServiceDescribeRequest__Output, _tercet_v1_TokenizerServiceDescribeResponse__Output>
  Detokenize: MethodDefinition<_tercet_v1_TokenizerServiceDetokenizeRequest, _tercet_v1_TokenizerServiceDetokenizeResponse, _tercet_v1_TokenizerServiceDetokenizeRequest__Output, _tercet_v1_TokenizerServiceDetokenizeResponse__Output>
  Generate: MethodDefinition<_tercet_v1_TokenizerServiceGenerateRequest, _tercet_v1_TokenizerServiceGenerateResponse, _tercet_v1_TokenizerServiceGenerateRequest__Output, _tercet_v1_TokenizerServiceGenerateResponse__Output>
  GetTokenizer: MethodDefinition<_tercet_v1_TokenizerServiceGetTokenizerRequest, _tercet_v1_TokenizerServiceGetTokenizerResponse, _tercet_v1_TokenizerServiceGetTokenizerRequest__Output, _tercet_v1_TokenizerServiceGetTokenizerResponse__Output>
  RenderChat: MethodDefinition<_tercet_v1_TokenizerServiceRenderChatRequest, _tercet_v1_TokenizerServiceRenderChatResponse, _tercet_v1_TokenizerServiceRenderChatRequest__Output, _tercet_v1_TokenizerServiceRenderChatResponse__Output>
  Tokenize: MethodDefinition<_tercet_v1_TokenizerServiceTokenizeRequest, _tercet_v1_TokenizerServiceTokenizeResponse, _tercet_v1_TokenizerServiceTokenizeRequest__Output, _tercet_v1_TokenizerServiceTokenizeResponse__Output>
}
