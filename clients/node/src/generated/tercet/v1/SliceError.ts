// Original file: ../../protos/tercet/v1/executor.proto

import type { SliceErrorCode as _tercet_v1_SliceErrorCode, SliceErrorCode__Output as _tercet_v1_SliceErrorCode__Output } from '../../tercet/v1/SliceErrorCode.js';

export interface SliceError {
  'code'?: (_tercet_v1_SliceErrorCode);
  'message'?: (string);
}

export interface SliceError__Output {
  'code'?: (_tercet_v1_SliceErrorCode__Output);
  'message'?: (string);
}
