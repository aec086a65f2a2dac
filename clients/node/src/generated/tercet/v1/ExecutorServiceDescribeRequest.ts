// Original file: ../../protos/tercet/v1/executor.proto


export interface ExecutorServiceDescribeRequest {
}

export interface ExecutorServiceDescribeRequest__Output {
}
