/** What callers hand in and get back. Durations are milliseconds. */

export interface Message {
  readonly role: "system" | "user" | "assistant" | "tool";
  readonly content: string;
  readonly name?: string;
  /** Calls that the assistant made, in OpenAI's form. */
  readonly toolCalls?: readonly unknown[];
  readonly toolCallId?: string;
}

export interface Grammar {
  readonly kind: "json_object" | "json_schema" | "regex" | "ebnf" | "choice";
  readonly source?: string;
}

/** What is not given is the server's to choose; a zero is sent as a zero. */
export interface SamplingOptions {
  readonly temperature?: number;
  readonly topK?: number;
  readonly topP?: number;
  readonly minP?: number;
  /** 64 bits without sign: a bigint where it is above Number.MAX_SAFE_INTEGER. */
  readonly seed?: number | bigint;
  readonly maxTokens?: number;
  readonly minTokens?: number;
  readonly n?: number;
  readonly stop?: string | readonly string[];
  readonly stopTokenIds?: readonly number[];
  readonly includeStop?: boolean;
  readonly ignoreEos?: boolean;
  readonly logitBias?: ReadonlyMap<number, number>;
  readonly repetitionPenalty?: number;
  readonly presencePenalty?: number;
  readonly frequencyPenalty?: number;
  readonly logprobs?: number;
  readonly promptLogprobs?: number;
  readonly grammar?: Grammar;
}

export interface CallOptions {
  /** 1 to 128 of A-Z a-z 0-9 . _ : -; drawn if absent. */
  readonly requestId?: string;
  readonly tenant?: string;
  /** Milliseconds for the whole call, retries included. */
  readonly timeoutMs?: number;
  /** Aborting it ends the call, on the server too. */
  readonly signal?: AbortSignal;
}

export interface TimeLimits {
  readonly queueMs?: number;
  readonly firstTokenMs?: number;
  readonly betweenTokensMs?: number;
  readonly totalMs?: number;
}

export interface GenerateOptions extends SamplingOptions, CallOptions {
  readonly priority?: number;
  readonly limits?: TimeLimits;
  readonly keepSpecialTokens?: boolean;
  readonly cacheSalt?: string;
  readonly cacheBypass?: boolean;
  readonly echo?: boolean;
  /** Name of the model expected. */
  readonly model?: string;
}

export interface ChatOptions extends GenerateOptions {
  readonly addGenerationPrompt?: boolean;
  /** Functions that the model may call, in OpenAI's form. */
  readonly tools?: readonly unknown[];
}

export interface TokenLogprob {
  readonly tokenId: number;
  readonly logprob: number;
  readonly text: string;
  readonly bytes: Buffer;
}

export interface Logprobs {
  readonly drawn: TokenLogprob;
  readonly top: readonly TokenLogprob[];
}

export interface Delta {
  readonly index: number;
  readonly text: string;
  readonly tokenIds: readonly number[];
  readonly logprobs: readonly Logprobs[];
}

export interface Accepted {
  readonly requestId: string;
  readonly queuePosition: number;
  readonly seed: bigint;
  readonly maxTokens: number;
  readonly promptTokens: number;
  readonly promptIds: readonly number[];
  readonly numerics: string;
  readonly model: string;
  /** Answers that come: fewer than asked for where the server is under pressure. 0: as many as asked for. */
  readonly n: number;
}

export type FinishReason = "stop" | "length" | "time_limit";

export interface Usage {
  readonly promptTokens: number;
  readonly cachedTokens: number;
  readonly deliveredTokens: number;
  readonly sampledTokens: number;
  readonly discardedTokens: number;
  readonly preemptions: number;
  readonly recomputedTokens: number;
}

export interface Timings {
  readonly tokenizeMs: number;
  readonly queueMs: number;
  readonly prefillMs: number;
  readonly decodeMs: number;
  readonly firstTokenMs: number;
  readonly totalMs: number;
}

/** As far as it came: what is unknown yet is undefined. */
export interface Answer {
  readonly index: number;
  readonly text: string;
  readonly tokenIds: readonly number[];
  readonly logprobs: readonly Logprobs[];
  readonly finishReason?: FinishReason;
  readonly stopMatch?: string;
  readonly usage?: Usage;
  readonly timings?: Timings;
}

export interface RenderedChat {
  readonly text: string;
  readonly tokenIds: readonly number[];
}

export interface ServerDescription {
  readonly model: string;
  readonly modelHash: string;
  readonly tokenizerHash: string;
  readonly maxModelLen: number;
  readonly vocabSize: number;
  readonly eosTokenIds: readonly number[];
  readonly numerics: string;
  readonly hasChatTemplate: boolean;
}
