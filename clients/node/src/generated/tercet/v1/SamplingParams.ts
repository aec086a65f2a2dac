// Original file: ../../protos/tercet/v1/common.proto

import type { LogitBias as _tercet_v1_LogitBias, LogitBias__Output as _tercet_v1_LogitBias__Output } from '../../tercet/v1/LogitBias.js';
import type { Grammar as _tercet_v1_Grammar, Grammar__Output as _tercet_v1_Grammar__Output } from '../../tercet/v1/Grammar.js';
import type { Long } from '@grpc/proto-loader';

export interface SamplingParams {
  'logitBias'?: (_tercet_v1_LogitBias)[];
  'repetitionPenalty'?: (number | string);
  'presencePenalty'?: (number | string);
  'frequencyPenalty'?: (number | string);
  'minTokens'?: (number);
  'stopTokenIds'?: (number)[];
  'ignoreEos'?: (boolean);
  'grammar'?: (_tercet_v1_Grammar | null);
  'temperature'?: (number | string);
  'topK'?: (number);
  'topP'?: (number | string);
  'minP'?: (number | string);
  'seed'?: (number | string | Long);
  'maxTokens'?: (number);
  'n'?: (number);
  'logprobs'?: (number);
  'promptLogprobs'?: (number);
  '_repetitionPenalty'?: "repetitionPenalty";
  '_presencePenalty'?: "presencePenalty";
  '_frequencyPenalty'?: "frequencyPenalty";
  '_minTokens'?: "minTokens";
  '_ignoreEos'?: "ignoreEos";
  '_grammar'?: "grammar";
  '_temperature'?: "temperature";
  '_topK'?: "topK";
  '_topP'?: "topP";
  '_minP'?: "minP";
  '_seed'?: "seed";
  '_maxTokens'?: "maxTokens";
  '_n'?: "n";
  '_logprobs'?: "logprobs";
  '_promptLogprobs'?: "promptLogprobs";
}

export interface SamplingParams__Output {
  'logitBias'?: (_tercet_v1_LogitBias__Output)[];
  'repetitionPenalty'?: (number);
  'presencePenalty'?: (number);
  'frequencyPenalty'?: (number);
  'minTokens'?: (number);
  'stopTokenIds'?: (number)[];
  'ignoreEos'?: (boolean);
  'grammar'?: (_tercet_v1_Grammar__Output);
  'temperature'?: (number);
  'topK'?: (number);
  'topP'?: (number);
  'minP'?: (number);
  'seed'?: (string);
  'maxTokens'?: (number);
  'n'?: (number);
  'logprobs'?: (number);
  'promptLogprobs'?: (number);
  '_repetitionPenalty'?: "repetitionPenalty";
  '_presencePenalty'?: "presencePenalty";
  '_frequencyPenalty'?: "frequencyPenalty";
  '_minTokens'?: "minTokens";
  '_ignoreEos'?: "ignoreEos";
  '_grammar'?: "grammar";
  '_temperature'?: "temperature";
  '_topK'?: "topK";
  '_topP'?: "topP";
  '_minP'?: "minP";
  '_seed'?: "seed";
  '_maxTokens'?: "maxTokens";
  '_n'?: "n";
  '_logprobs'?: "logprobs";
  '_promptLogprobs'?: "promptLogprobs";
}
