// Original file: ../../protos/tercet/v1/executor.proto

import type * as grpc from '@grpc/grpc-js'
import type { MethodDefinition } from '@grpc/proto-loader'
import type { ExecutorServiceDescribeRequest as _tercet_v1_ExecutorServiceDescribeRequest, ExecutorServiceDescribeRequest__Output as _tercet_v1_ExecutorServiceDescribeRequest__Output } from '../../tercet/v1/ExecutorServiceDescribeRequest.js';
import type { ExecutorServiceDescribeResponse as _tercet_v1_ExecutorServiceDescribeResponse, ExecutorServiceDescribeResponse__Output as _tercet_v1_ExecutorServiceDescribeResponse__Output } from '../../tercet/v1/ExecutorServiceDescribeResponse.js';
import type { ExecutorServiceRunRequest as _tercet_v1_ExecutorServiceRunRequest, ExecutorServiceRunRequest__Output as _tercet_v1_ExecutorServiceRunRequest__Output } from '../../tercet/v1/ExecutorServiceRunRequest.js';
import type { ExecutorServiceRunResponse as _tercet_v1_ExecutorServiceRunResponse, ExecutorServiceRunResponse__Output as _tercet_v1_ExecutorServiceRunResponse__Output } from '../../tercet/v1/ExecutorServiceRunResponse.js';

export interface ExecutorServiceClient extends grpc.Client {
  Describe(argument: _tercet_v1_ExecutorServiceDescribeRequest, metadata: grpc.Metadata, options: grpc.CallOptions, callback: grpc.requestCallback<_tercet_v1_ExecutorServiceDescribeResponse__Output>): grpc.ClientUnaryCall;
  Describe(argument: _tercet_v1_ExecutorServiceDescribeRequest, metadata: grpc.Metadata, callback: grpc.requestCallback<_tercet_v1_ExecutorServiceDescribeResponse__Output>): grpc.ClientUnaryCall;
  Describe(argument: _tercet_v1_ExecutorServiceDescribeRequest, options: grpc.CallOptions, callback: grpc.requestCallback<_tercet_v1_ExecutorServiceDescribeResponse__Output>): grpc.ClientUnaryCall;
  Describe(argument: _tercet_v1_ExecutorServiceDescribeRequest, callback: grpc.requestCallback<_tercet_v1_ExecutorServiceDescribeResponse__Output>): grpc.ClientUnaryCall;
  describe(argument: _tercet_v1_ExecutorServiceDescribeRequest, metadata: grpc.Metadata, options: grpc.CallOptions, callback: grpc.requestCallback<_tercet_v1_ExecutorServiceDescribeResponse__Output>): grpc.ClientUnaryCall;
  describe(argument: _tercet_v1_ExecutorServiceDescribeRequest, metadata: grpc.Metadata, callback: grpc.requestCallback<_tercet_v1_ExecutorServiceDescribeResponse__Output>): grpc.ClientUnaryCall;
  describe(argument: _tercet_v1_ExecutorServiceDescribeRequest, options: grpc.CallOptions, callback: grpc.requestCallback<_tercet_v1_ExecutorServiceDescribeResponse__Output>): grpc.ClientUnaryCall;
  describe(argument: _tercet_v1_ExecutorServiceDescribeRequest, callback: grpc.requestCallback<_tercet_v1_ExecutorServiceDescribeResponse__Output>): grpc.ClientUnaryCall;
  
  Run(metadata: grpc.Metadata, options?: grpc.CallOptions): grpc.ClientDuplexStream<_tercet_v1_ExecutorServiceRunRequest, _tercet_v1_ExecutorServiceRunResponse__Output>;
  Run(options?: grpc.CallOptions): grpc.ClientDuplexStream<_tercet_v1_ExecutorServiceRunRequest, _tercet_v1_ExecutorServiceRunResponse__Output>;
  run(metadata: grpc.Metadata, options?: grpc.CallOptions): grpc.ClientDuplexStream<_tercet_v1_ExecutorServiceRunRequest, _tercet_v1_ExecutorServiceRunResponse__Output>;
  run(options?: grpc.CallOptions): grpc.ClientDuplexStream<_tercet_v1_ExecutorServiceRunRequest, _tercet_v1_ExecutorServiceRunResponse__Output>;
  
}

export interface ExecutorServiceHandlers extends grpc.UntypedServiceImplementation {
  Describe: grpc.handleUnaryCall<_tercet_v1_ExecutorServiceDescribeRequest__Output, _tercet_v1_ExecutorServiceDescribeResponse>;
  
  Run: grpc.handleBidiStreamingCall<_tercet_v1_ExecutorServiceRunRequest__Output, _tercet_v1_ExecutorServiceRunResponse>;
  
}

export interface ExecutorServiceDefinition extends grpc.ServiceDefinition {
  Describe: MethodDefinition<_tercet_v1_ExecutorServiceDescribeRequest, _tercet_v1_ExecutorServiceDescribeResponse, _tercet_v1_ExecutorServiceDescribeRequest__Output, _tercet_v1_ExecutorServiceDescribeResponse__Output>
  Run: MethodDefinition<_tercet_v1_ExecutorServiceRunRequest, _tercet_v1_ExecutorServiceRunResponse, _tercet_v1_ExecutorServiceRunRequest__Output, _tercet_v1_ExecutorServiceRunResponse__Output>
}
