import type * as grpc from '@grpc/grpc-js';
import type { EnumTypeDefinition, MessageTypeDefinition } from '@grpc/proto-loader';

import type { Accepted as _tercet_v1_Accepted, Accepted__Output as _tercet_v1_Accepted__Output } from './tercet/v1/Accepted.js';
import type { CacheControl as _tercet_v1_CacheControl, CacheControl__Output as _tercet_v1_CacheControl__Output } from './tercet/v1/CacheControl.js';
import type { ChatMessage as _tercet_v1_ChatMessage, ChatMessage__Output as _tercet_v1_ChatMessage__Output } from './tercet/v1/ChatMessage.js';
import type { ChatPrompt as _tercet_v1_ChatPrompt, ChatPrompt__Output as _tercet_v1_ChatPrompt__Output } from './tercet/v1/ChatPrompt.js';
import type { Finished as _tercet_v1_Finished, Finished__Output as _tercet_v1_Finished__Output } from './tercet/v1/Finished.js';
import type { Grammar as _tercet_v1_Grammar, Grammar__Output as _tercet_v1_Grammar__Output } from './tercet/v1/Grammar.js';
import type { LogitBias as _tercet_v1_LogitBias, LogitBias__Output as _tercet_v1_LogitBias__Output } from './tercet/v1/LogitBias.js';
import type { ModelDescription as _tercet_v1_ModelDescription, ModelDescription__Output as _tercet_v1_ModelDescription__Output } from './tercet/v1/ModelDescription.js';
import type { PhaseTimes as _tercet_v1_PhaseTimes, PhaseTimes__Output as _tercet_v1_PhaseTimes__Output } from './tercet/v1/PhaseTimes.js';
import type { RequestContext as _tercet_v1_RequestContext, RequestContext__Output as _tercet_v1_RequestContext__Output } from './tercet/v1/RequestContext.js';
import type { Resume as _tercet_v1_Resume, Resume__Output as _tercet_v1_Resume__Output } from './tercet/v1/Resume.js';
import type { ResumedAnswer as _tercet_v1_ResumedAnswer, ResumedAnswer__Output as _tercet_v1_ResumedAnswer__Output } from './tercet/v1/ResumedAnswer.js';
import type { SamplingParams as _tercet_v1_SamplingParams, SamplingParams__Output as _tercet_v1_SamplingParams__Output } from './tercet/v1/SamplingParams.js';
import type { TextDelta as _tercet_v1_TextDelta, TextDelta__Output as _tercet_v1_TextDelta__Output } from './tercet/v1/TextDelta.js';
import type { TextLogprob as _tercet_v1_TextLogprob, TextLogprob__Output as _tercet_v1_TextLogprob__Output } from './tercet/v1/TextLogprob.js';
import type { TextLogprobs as _tercet_v1_TextLogprobs, TextLogprobs__Output as _tercet_v1_TextLogprobs__Output } from './tercet/v1/TextLogprobs.js';
import type { TextPromptLogprobs as _tercet_v1_TextPromptLogprobs, TextPromptLogprobs__Output as _tercet_v1_TextPromptLogprobs__Output } from './tercet/v1/TextPromptLogprobs.js';
import type { TimeLimits as _tercet_v1_TimeLimits, TimeLimits__Output as _tercet_v1_TimeLimits__Output } from './tercet/v1/TimeLimits.js';
import type { TokenIds as _tercet_v1_TokenIds, TokenIds__Output as _tercet_v1_TokenIds__Output } from './tercet/v1/TokenIds.js';
import type { TokenLogprob as _tercet_v1_TokenLogprob, TokenLogprob__Output as _tercet_v1_TokenLogprob__Output } from './tercet/v1/TokenLogprob.js';
import type { TokenLogprobs as _tercet_v1_TokenLogprobs, TokenLogprobs__Output as _tercet_v1_TokenLogprobs__Output } from './tercet/v1/TokenLogprobs.js';
import type { TokenizerServiceClient as _tercet_v1_TokenizerServiceClient, TokenizerServiceDefinition as _tercet_v1_TokenizerServiceDefinition } from './tercet/v1/TokenizerService.js';
import type { TokenizerServiceDescribeRequest as _tercet_v1_TokenizerServiceDescribeRequest, TokenizerServiceDescribeRequest__Output as _tercet_v1_TokenizerServiceDescribeRequest__Output } from './tercet/v1/TokenizerServiceDescribeRequest.js';
import type { TokenizerServiceDescribeResponse as _tercet_v1_TokenizerServiceDescribeResponse, TokenizerServiceDescribeResponse__Output as _tercet_v1_TokenizerServiceDescribeResponse__Output } from './tercet/v1/TokenizerServiceDescribeResponse.js';
import type { TokenizerServiceDetokenizeRequest as _tercet_v1_TokenizerServiceDetokenizeRequest, TokenizerServiceDetokenizeRequest__Output as _tercet_v1_TokenizerServiceDetokenizeRequest__Output } from './tercet/v1/TokenizerServiceDetokenizeRequest.js';
import type { TokenizerServiceDetokenizeResponse as _tercet_v1_TokenizerServiceDetokenizeResponse, TokenizerServiceDetokenizeResponse__Output as _tercet_v1_TokenizerServiceDetokenizeResponse__Output } from './tercet/v1/TokenizerServiceDetokenizeResponse.js';
import type { TokenizerServiceGenerateRequest as _tercet_v1_TokenizerServiceGenerateRequest, TokenizerServiceGenerateRequest__Output as _tercet_v1_TokenizerServiceGenerateRequest__Output } from './tercet/v1/TokenizerServiceGenerateRequest.js';
import type { TokenizerServiceGenerateResponse as _tercet_v1_TokenizerServiceGenerateResponse, TokenizerServiceGenerateResponse__Output as _tercet_v1_TokenizerServiceGenerateResponse__Output } from './tercet/v1/TokenizerServiceGenerateResponse.js';
import type { TokenizerServiceGetTokenizerRequest as _tercet_v1_TokenizerServiceGetTokenizerRequest, TokenizerServiceGetTokenizerRequest__Output as _tercet_v1_TokenizerServiceGetTokenizerRequest__Output } from './tercet/v1/TokenizerServiceGetTokenizerRequest.js';
import type { TokenizerServiceGetTokenizerResponse as _tercet_v1_TokenizerServiceGetTokenizerResponse, TokenizerServiceGetTokenizerResponse__Output as _tercet_v1_TokenizerServiceGetTokenizerResponse__Output } from './tercet/v1/TokenizerServiceGetTokenizerResponse.js';
import type { TokenizerServiceRenderChatRequest as _tercet_v1_TokenizerServiceRenderChatRequest, TokenizerServiceRenderChatRequest__Output as _tercet_v1_TokenizerServiceRenderChatRequest__Output } from './tercet/v1/TokenizerServiceRenderChatRequest.js';
import type { TokenizerServiceRenderChatResponse as _tercet_v1_TokenizerServiceRenderChatResponse, TokenizerServiceRenderChatResponse__Output as _tercet_v1_TokenizerServiceRenderChatResponse__Output } from './tercet/v1/TokenizerServiceRenderChatResponse.js';
import type { TokenizerServiceTokenizeRequest as _tercet_v1_TokenizerServiceTokenizeRequest, TokenizerServiceTokenizeRequest__Output as _tercet_v1_TokenizerServiceTokenizeRequest__Output } from './tercet/v1/TokenizerServiceTokenizeRequest.js';
import type { TokenizerServiceTokenizeResponse as _tercet_v1_TokenizerServiceTokenizeResponse, TokenizerServiceTokenizeResponse__Output as _tercet_v1_TokenizerServiceTokenizeResponse__Output } from './tercet/v1/TokenizerServiceTokenizeResponse.js';
import type { Usage as _tercet_v1_Usage, Usage__Output as _tercet_v1_Usage__Output } from './tercet/v1/Usage.js';

type SubtypeConstructor<Constructor extends new (...args: any) => any, Subtype> = {
  new(...args: ConstructorParameters<Constructor>): Subtype;
};

export interface ProtoGrpcType {
  tercet: {
    v1: {
      Accepted: MessageTypeDefinition<_tercet_v1_Accepted, _tercet_v1_Accepted__Output>
      CacheControl: MessageTypeDefinition<_tercet_v1_CacheControl, _tercet_v1_CacheControl__Output>
      ChatMessage: MessageTypeDefinition<_tercet_v1_ChatMessage, _tercet_v1_ChatMessage__Output>
      ChatPrompt: MessageTypeDefinition<_tercet_v1_ChatPrompt, _tercet_v1_ChatPrompt__Output>
      FinishReason: EnumTypeDefinition
      Finished: MessageTypeDefinition<_tercet_v1_Finished, _tercet_v1_Finished__Output>
      Grammar: MessageTypeDefinition<_tercet_v1_Grammar, _tercet_v1_Grammar__Output>
      GrammarKind: EnumTypeDefinition
      LogitBias: MessageTypeDefinition<_tercet_v1_LogitBias, _tercet_v1_LogitBias__Output>
      ModelDescription: MessageTypeDefinition<_tercet_v1_ModelDescription, _tercet_v1_ModelDescription__Output>
      PhaseTimes: MessageTypeDefinition<_tercet_v1_PhaseTimes, _tercet_v1_PhaseTimes__Output>
      RequestContext: MessageTypeDefinition<_tercet_v1_RequestContext, _tercet_v1_RequestContext__Output>
      Resume: MessageTypeDefinition<_tercet_v1_Resume, _tercet_v1_Resume__Output>
      ResumedAnswer: MessageTypeDefinition<_tercet_v1_ResumedAnswer, _tercet_v1_ResumedAnswer__Output>
      SamplingParams: MessageTypeDefinition<_tercet_v1_SamplingParams, _tercet_v1_SamplingParams__Output>
      SchemaRevision: EnumTypeDefinition
      TextDelta: MessageTypeDefinition<_tercet_v1_TextDelta, _tercet_v1_TextDelta__Output>
      TextLogprob: MessageTypeDefinition<_tercet_v1_TextLogprob, _tercet_v1_TextLogprob__Output>
      TextLogprobs: MessageTypeDefinition<_tercet_v1_TextLogprobs, _tercet_v1_TextLogprobs__Output>
      TextPromptLogprobs: MessageTypeDefinition<_tercet_v1_TextPromptLogprobs, _tercet_v1_TextPromptLogprobs__Output>
      TimeLimitKind: EnumTypeDefinition
      TimeLimits: MessageTypeDefinition<_tercet_v1_TimeLimits, _tercet_v1_TimeLimits__Output>
      TokenIds: MessageTypeDefinition<_tercet_v1_TokenIds, _tercet_v1_TokenIds__Output>
      TokenLogprob: MessageTypeDefinition<_tercet_v1_TokenLogprob, _tercet_v1_TokenLogprob__Output>
      TokenLogprobs: MessageTypeDefinition<_tercet_v1_TokenLogprobs, _tercet_v1_TokenLogprobs__Output>
      TokenizerService: SubtypeConstructor<typeof grpc.Client, _tercet_v1_TokenizerServiceClient> & { service: _tercet_v1_TokenizerServiceDefinition }
      TokenizerServiceDescribeRequest: MessageTypeDefinition<_tercet_v1_TokenizerServiceDescribeRequest, _tercet_v1_TokenizerServiceDescribeRequest__Output>
      TokenizerServiceDescribeResponse: MessageTypeDefinition<_tercet_v1_TokenizerServiceDescribeResponse, _tercet_v1_TokenizerServiceDescribeResponse__Output>
      TokenizerServiceDetokenizeRequest: MessageTypeDefinition<_tercet_v1_TokenizerServiceDetokenizeRequest, _tercet_v1_TokenizerServiceDetokenizeRequest__Output>
      TokenizerServiceDetokenizeResponse: MessageTypeDefinition<_tercet_v1_TokenizerServiceDetokenizeResponse, _tercet_v1_TokenizerServiceDetokenizeResponse__Output>
      TokenizerServiceGenerateRequest: MessageTypeDefinition<_tercet_v1_TokenizerServiceGenerateRequest, _tercet_v1_TokenizerServiceGenerateRequest__Output>
      TokenizerServiceGenerateResponse: MessageTypeDefinition<_tercet_v1_TokenizerServiceGenerateResponse, _tercet_v1_TokenizerServiceGenerateResponse__Output>
      TokenizerServiceGetTokenizerRequest: MessageTypeDefinition<_tercet_v1_TokenizerServiceGetTokenizerRequest, _tercet_v1_TokenizerServiceGetTokenizerRequest__Output>
      TokenizerServiceGetTokenizerResponse: MessageTypeDefinition<_tercet_v1_TokenizerServiceGetTokenizerResponse, _tercet_v1_TokenizerServiceGetTokenizerResponse__Output>
      TokenizerServiceRenderChatRequest: MessageTypeDefinition<_tercet_v1_TokenizerServiceRenderChatRequest, _tercet_v1_TokenizerServiceRenderChatRequest__Output>
      TokenizerServiceRenderChatResponse: MessageTypeDefinition<_tercet_v1_TokenizerServiceRenderChatResponse, _tercet_v1_TokenizerServiceRenderChatResponse__Output>
      TokenizerServiceTokenizeRequest: MessageTypeDefinition<_tercet_v1_TokenizerServiceTokenizeRequest, _tercet_v1_TokenizerServiceTokenizeRequest__Output>
      TokenizerServiceTokenizeResponse: MessageTypeDefinition<_tercet_v1_TokenizerServiceTokenizeResponse, _tercet_v1_TokenizerServiceTokenizeResponse__Output>
      Usage: MessageTypeDefinition<_tercet_v1_Usage, _tercet_v1_Usage__Output>
    }
  }
}

