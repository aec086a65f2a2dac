// Original file: ../../protos/tercet/v1/executor.proto

import type { Granted as _tercet_v1_Granted, Granted__Output as _tercet_v1_Granted__Output } from '../../tercet/v1/Granted.js';
import type { StepResult as _tercet_v1_StepResult, StepResult__Output as _tercet_v1_StepResult__Output } from '../../tercet/v1/StepResult.js';
import type { Heartbeat as _tercet_v1_Heartbeat, Heartbeat__Output as _tercet_v1_Heartbeat__Output } from '../../tercet/v1/Heartbeat.js';
import type { Prepared as _tercet_v1_Prepared, Prepared__Output as _tercet_v1_Prepared__Output } from '../../tercet/v1/Prepared.js';

export interface ExecutorServiceRunResponse {
  'granted'?: (_tercet_v1_Granted | null);
  'result'?: (_tercet_v1_StepResult | null);
  'heartbeat'?: (_tercet_v1_Heartbeat | null);
  'prepared'?: (_tercet_v1_Prepared | null);
  'message'?: "granted"|"result"|"heartbeat"|"prepared";
}

export interface ExecutorServiceRunResponse__Output {
  'granted'?: (_tercet_v1_Granted__Output);
  'result'?: (_tercet_v1_StepResult__Output);
  'heartbeat'?: (_tercet_v1_Heartbeat__Output);
  'prepared'?: (_tercet_v1_Prepared__Output);
  'message'?: "granted"|"result"|"heartbeat"|"prepared";
}
