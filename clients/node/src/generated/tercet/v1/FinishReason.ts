// Original file: ../../protos/tercet/v1/common.proto

export const FinishReason = {
  FINISH_REASON_UNSPECIFIED: 'FINISH_REASON_UNSPECIFIED',
  FINISH_REASON_STOP: 'FINISH_REASON_STOP',
  FINISH_REASON_LENGTH: 'FINISH_REASON_LENGTH',
  FINISH_REASON_TIME_LIMIT: 'FINISH_REASON_TIME_LIMIT',
} as const;

export type FinishReason =
  | 'FINISH_REASON_UNSPECIFIED'
  | 0
  | 'FINISH_REASON_STOP'
  | 1
  | 'FINISH_REASON_LENGTH'
  | 2
  | 'FINISH_REASON_TIME_LIMIT'
  | 3

export type FinishReason__Output = typeof FinishReason[keyof typeof FinishReason]
