// Original file: ../../protos/tercet/v1/executor.proto

import type { Claim as _tercet_v1_Claim, Claim__Output as _tercet_v1_Claim__Output } from '../../tercet/v1/Claim.js';
import type { Step as _tercet_v1_Step, Step__Output as _tercet_v1_Step__Output } from '../../tercet/v1/Step.js';
import type { Prepare as _tercet_v1_Prepare, Prepare__Output as _tercet_v1_Prepare__Output } from '../../tercet/v1/Prepare.js';

export interface ExecutorServiceRunRequest {
  'claim'?: (_tercet_v1_Claim | null);
  'step'?: (_tercet_v1_Step | null);
  'prepare'?: (_tercet_v1_Prepare | null);
  'message'?: "claim"|"step"|"prepare";
}

export interface ExecutorServiceRunRequest__Output {
  'claim'?: (_tercet_v1_Claim__Output);
  'step'?: (_tercet_v1_Step__Output);
  'prepare'?: (_tercet_v1_Prepare__Output);
  'message'?: "claim"|"step"|"prepare";
}
