// Original file: ../../protos/tercet/v1/executor.proto

export const SliceErrorCode = {
  SLICE_ERROR_CODE_UNSPECIFIED: 'SLICE_ERROR_CODE_UNSPECIFIED',
  SLICE_ERROR_CODE_NAN_LOGITS: 'SLICE_ERROR_CODE_NAN_LOGITS',
  SLICE_ERROR_CODE_GRAMMAR_DEAD_END: 'SLICE_ERROR_CODE_GRAMMAR_DEAD_END',
} as const;

export type SliceErrorCode =
  | 'SLICE_ERROR_CODE_UNSPECIFIED'
  | 0
  | 'SLICE_ERROR_CODE_NAN_LOGITS'
  | 1
  | 'SLICE_ERROR_CODE_GRAMMAR_DEAD_END'
  | 2

export type SliceErrorCode__Output = typeof SliceErrorCode[keyof typeof SliceErrorCode]
