import type * as grpc from '@grpc/grpc-js';
import type { EnumTypeDefinition, MessageTypeDefinition } from '@grpc/proto-loader';

import type { CacheControl as _tercet_v1_CacheControl, CacheControl__Output as _tercet_v1_CacheControl__Output } from './tercet/v1/CacheControl.js';
import type { Claim as _tercet_v1_Claim, Claim__Output as _tercet_v1_Claim__Output } from './tercet/v1/Claim.js';
import type { ExecutorServiceClient as _tercet_v1_ExecutorServiceClient, ExecutorServiceDefinition as _tercet_v1_ExecutorServiceDefinition } from './tercet/v1/ExecutorService.js';
import type { ExecutorServiceDescribeRequest as _tercet_v1_ExecutorServiceDescribeRequest, ExecutorServiceDescribeRequest__Output as _tercet_v1_ExecutorServiceDescribeRequest__Output } from './tercet/v1/ExecutorServiceDescribeRequest.js';
import type { ExecutorServiceDescribeResponse as _tercet_v1_ExecutorServiceDescribeResponse, ExecutorServiceDescribeResponse__Output as _tercet_v1_ExecutorServiceDescribeResponse__Output } from './tercet/v1/ExecutorServiceDescribeResponse.js';
import type { ExecutorServiceRunRequest as _tercet_v1_ExecutorServiceRunRequest, ExecutorServiceRunRequest__Output as _tercet_v1_ExecutorServiceRunRequest__Output } from './tercet/v1/ExecutorServiceRunRequest.js';
import type { ExecutorServiceRunResponse as _tercet_v1_ExecutorServiceRunResponse, ExecutorServiceRunResponse__Output as _tercet_v1_ExecutorServiceRunResponse__Output } from './tercet/v1/ExecutorServiceRunResponse.js';
import type { Grammar as _tercet_v1_Grammar, Grammar__Output as _tercet_v1_Grammar__Output } from './tercet/v1/Grammar.js';
import type { Granted as _tercet_v1_Granted, Granted__Output as _tercet_v1_Granted__Output } from './tercet/v1/Granted.js';
import type { Heartbeat as _tercet_v1_Heartbeat, Heartbeat__Output as _tercet_v1_Heartbeat__Output } from './tercet/v1/Heartbeat.js';
import type { LogitBias as _tercet_v1_LogitBias, LogitBias__Output as _tercet_v1_LogitBias__Output } from './tercet/v1/LogitBias.js';
import type { ModelDescription as _tercet_v1_ModelDescription, ModelDescription__Output as _tercet_v1_ModelDescription__Output } from './tercet/v1/ModelDescription.js';
import type { NewSequence as _tercet_v1_NewSequence, NewSequence__Output as _tercet_v1_NewSequence__Output } from './tercet/v1/NewSequence.js';
import type { PhaseTimes as _tercet_v1_PhaseTimes, PhaseTimes__Output as _tercet_v1_PhaseTimes__Output } from './tercet/v1/PhaseTimes.js';
import type { Prepare as _tercet_v1_Prepare, Prepare__Output as _tercet_v1_Prepare__Output } from './tercet/v1/Prepare.js';
import type { Prepared as _tercet_v1_Prepared, Prepared__Output as _tercet_v1_Prepared__Output } from './tercet/v1/Prepared.js';
import type { RequestContext as _tercet_v1_RequestContext, RequestContext__Output as _tercet_v1_RequestContext__Output } from './tercet/v1/RequestContext.js';
import type { Resume as _tercet_v1_Resume, Resume__Output as _tercet_v1_Resume__Output } from './tercet/v1/Resume.js';
import type { ResumedAnswer as _tercet_v1_ResumedAnswer, ResumedAnswer__Output as _tercet_v1_ResumedAnswer__Output } from './tercet/v1/ResumedAnswer.js';
import type { SamplingParams as _tercet_v1_SamplingParams, SamplingParams__Output as _tercet_v1_SamplingParams__Output } from './tercet/v1/SamplingParams.js';
import type { Slice as _tercet_v1_Slice, Slice__Output as _tercet_v1_Slice__Output } from './tercet/v1/Slice.js';
import type { SliceError as _tercet_v1_SliceError, SliceError__Output as _tercet_v1_SliceError__Output } from './tercet/v1/SliceError.js';
import type { SliceResult as _tercet_v1_SliceResult, SliceResult__Output as _tercet_v1_SliceResult__Output } from './tercet/v1/SliceResult.js';
import type { Step as _tercet_v1_Step, Step__Output as _tercet_v1_Step__Output } from './tercet/v1/Step.js';
import type { StepResult as _tercet_v1_StepResult, StepResult__Output as _tercet_v1_StepResult__Output } from './tercet/v1/StepResult.js';
import type { StepTimings as _tercet_v1_StepTimings, StepTimings__Output as _tercet_v1_StepTimings__Output } from './tercet/v1/StepTimings.js';
import type { TimeLimits as _tercet_v1_TimeLimits, TimeLimits__Output as _tercet_v1_TimeLimits__Output } from './tercet/v1/TimeLimits.js';
import type { TokenLogprob as _tercet_v1_TokenLogprob, TokenLogprob__Output as _tercet_v1_TokenLogprob__Output } from './tercet/v1/TokenLogprob.js';
import type { TokenLogprobs as _tercet_v1_TokenLogprobs, TokenLogprobs__Output as _tercet_v1_TokenLogprobs__Output } from './tercet/v1/TokenLogprobs.js';
import type { Usage as _tercet_v1_Usage, Usage__Output as _tercet_v1_Usage__Output } from './tercet/v1/Usage.js';

type SubtypeConstructor<Constructor extends new (...args: any) => any, Subtype> = {
  new(...args: ConstructorParameters<Constructor>): Subtype;
};

export interface ProtoGrpcType {
  tercet: {
    v1: {
      CacheControl: MessageTypeDefinition<_tercet_v1_CacheControl, _tercet_v1_CacheControl__Output>
      Claim: MessageTypeDefinition<_tercet_v1_Claim, _tercet_v1_Claim__Output>
      ExecutorCapability: EnumTypeDefinition
      ExecutorService: SubtypeConstructor<typeof grpc.Client, _tercet_v1_ExecutorServiceClient> & { service: _tercet_v1_ExecutorServiceDefinition }
      ExecutorServiceDescribeRequest: MessageTypeDefinition<_tercet_v1_ExecutorServiceDescribeRequest, _tercet_v1_ExecutorServiceDescribeRequest__Output>
      ExecutorServiceDescribeResponse: MessageTypeDefinition<_tercet_v1_ExecutorServiceDescribeResponse, _tercet_v1_ExecutorServiceDescribeResponse__Output>
      ExecutorServiceRunRequest: MessageTypeDefinition<_tercet_v1_ExecutorServiceRunRequest, _tercet_v1_ExecutorServiceRunRequest__Output>
      ExecutorServiceRunResponse: MessageTypeDefinition<_tercet_v1_ExecutorServiceRunResponse, _tercet_v1_ExecutorServiceRunResponse__Output>
      FinishReason: EnumTypeDefinition
      Grammar: MessageTypeDefinition<_tercet_v1_Grammar, _tercet_v1_Grammar__Output>
      GrammarKind: EnumTypeDefinition
      Granted: MessageTypeDefinition<_tercet_v1_Granted, _tercet_v1_Granted__Output>
      Heartbeat: MessageTypeDefinition<_tercet_v1_Heartbeat, _tercet_v1_Heartbeat__Output>
      LogitBias: MessageTypeDefinition<_tercet_v1_LogitBias, _tercet_v1_LogitBias__Output>
      ModelDescription: MessageTypeDefinition<_tercet_v1_ModelDescription, _tercet_v1_ModelDescription__Output>
      NewSequence: MessageTypeDefinition<_tercet_v1_NewSequence, _tercet_v1_NewSequence__Output>
      PhaseTimes: MessageTypeDefinition<_tercet_v1_PhaseTimes, _tercet_v1_PhaseTimes__Output>
      Prepare: MessageTypeDefinition<_tercet_v1_Prepare, _tercet_v1_Prepare__Output>
      Prepared: MessageTypeDefinition<_tercet_v1_Prepared, _tercet_v1_Prepared__Output>
      RequestContext: MessageTypeDefinition<_tercet_v1_RequestContext, _tercet_v1_RequestContext__Output>
      Resume: MessageTypeDefinition<_tercet_v1_Resume, _tercet_v1_Resume__Output>
      ResumedAnswer: MessageTypeDefinition<_tercet_v1_ResumedAnswer, _tercet_v1_ResumedAnswer__Output>
      SamplingParams: MessageTypeDefinition<_tercet_v1_SamplingParams, _tercet_v1_SamplingParams__Output>
      SchemaRevision: EnumTypeDefinition
      Slice: MessageTypeDefinition<_tercet_v1_Slice, _tercet_v1_Slice__Output>
      SliceError: MessageTypeDefinition<_tercet_v1_SliceError, _tercet_v1_SliceError__Output>
      SliceErrorCode: EnumTypeDefinition
      SliceResult: MessageTypeDefinition<_tercet_v1_SliceResult, _tercet_v1_SliceResult__Output>
      Step: MessageTypeDefinition<_tercet_v1_Step, _tercet_v1_Step__Output>
      StepResult: MessageTypeDefinition<_tercet_v1_StepResult, _tercet_v1_StepResult__Output>
      StepTimings: MessageTypeDefinition<_tercet_v1_StepTimings, _tercet_v1_StepTimings__Output>
      TimeLimitKind: EnumTypeDefinition
      TimeLimits: MessageTypeDefinition<_tercet_v1_TimeLimits, _tercet_v1_TimeLimits__Output>
      TokenLogprob: MessageTypeDefinition<_tercet_v1_TokenLogprob, _tercet_v1_TokenLogprob__Output>
      TokenLogprobs: MessageTypeDefinition<_tercet_v1_TokenLogprobs, _tercet_v1_TokenLogprobs__Output>
      Usage: MessageTypeDefinition<_tercet_v1_Usage, _tercet_v1_Usage__Output>
    }
  }
}

