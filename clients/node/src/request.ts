/**
 * What callers hand in, as messages of the contract. Pure.
 *
 * Refuses what the wire cannot hold; ranges are the server's to check. An argument that is there is written, be it
 * zero; one that is absent is not.
 */
import type { ChatPrompt } from "./generated/tercet/v1/ChatPrompt.js";
import type { GrammarKind } from "./generated/tercet/v1/GrammarKind.js";
import type { SamplingParams } from "./generated/tercet/v1/SamplingParams.js";
import { invalid } from "./errors.js";
import type { GenerateMessage } from "./proto.js";
import type { ChatOptions, GenerateOptions, Grammar, Message, SamplingOptions, TimeLimits } from "./types.js";

const ID = /^[A-Za-z0-9._:-]{1,128}$/;
const MAX_ANSWERS = 128;
const MAX_TIMEOUT_MS = 2 ** 31 - 1;
const GRAMMARS: Readonly<Record<Grammar["kind"], GrammarKind>> = {
  json_object: "GRAMMAR_KIND_JSON_OBJECT",
  json_schema: "GRAMMAR_KIND_JSON_SCHEMA",
  regex: "GRAMMAR_KIND_REGEX",
  ebnf: "GRAMMAR_KIND_EBNF",
  choice: "GRAMMAR_KIND_CHOICE",
};

const SAMPLING = new Set([
  "temperature", "topK", "topP", "minP", "seed", "maxTokens", "minTokens", "n", "stop", "stopTokenIds", "includeStop",
  "ignoreEos", "logitBias", "repetitionPenalty", "presencePenalty", "frequencyPenalty", "logprobs", "promptLogprobs",
  "grammar",
]);
const CALL = new Set(["requestId", "tenant", "timeoutMs", "signal"]);
const GENERATE = new Set([
  ...SAMPLING, ...CALL, "priority", "limits", "keepSpecialTokens", "cacheSalt", "cacheBypass", "echo", "model",
]);
const CHAT = new Set([...GENERATE, "addGenerationPrompt", "tools"]);
const MESSAGE = new Set(["role", "content", "name", "toolCalls", "toolCallId"]);

export const NAMES = { call: CALL, generate: GENERATE, chat: CHAT } as const;

/** A misspelt option would silently be the server's default: it is refused. */
export function checkNames(where: string, given: object, known: ReadonlySet<string>): void {
  for (const name of Object.keys(given)) {
    if (!known.has(name)) throw invalid(name, `is no option of ${where}`);
  }
}

export function generateMessage(prompt: string | readonly number[], options: GenerateOptions): GenerateMessage {
  checkNames("generate", options, GENERATE);
  const message = common(options);
  if (typeof prompt === "string") return { ...message, text: text("prompt", prompt) };
  return { ...message, tokenIds: { ids: tokenIds("prompt", prompt) } };
}

export function chatMessage(messages: readonly Message[], options: ChatOptions): GenerateMessage {
  checkNames("chat", options, CHAT);
  return { ...common(options), chat: chatPrompt(messages, options) };
}

export function chatPrompt(messages: readonly Message[], options: Pick<ChatOptions, "addGenerationPrompt" | "tools">): ChatPrompt {
  if (!Array.isArray(messages) || messages.length === 0) throw invalid("messages", "must be a list of at least 1", 1);
  return {
    messages: messages.map((message: Message, index) => {
      const where = `messages[${index}]`;
      checkNames(where, message, MESSAGE);
      return present({
        role: text(`${where}.role`, message.role),
        content: text(`${where}.content`, message.content),
        name: optional(message.name, (name) => text(`${where}.name`, name)),
        toolCallsJson: optional(message.toolCalls, (calls) => json(`${where}.toolCalls`, calls)),
        toolCallId: optional(message.toolCallId, (id) => text(`${where}.toolCallId`, id)),
      });
    }),
    ...present({ addGenerationPrompt: flag("addGenerationPrompt", options.addGenerationPrompt) }),
    toolsJson: (options.tools ?? []).map((tool, index) => json(`tools[${index}]`, tool)),
  };
}

/** How many answers, checked: the stream allocates one place for each. */
export function answers(options: SamplingOptions): number {
  return options.n === undefined ? 1 : integer("n", options.n, 1, MAX_ANSWERS);
}

export function requestId(name: string, value: unknown): string {
  if (typeof value !== "string" || !ID.test(value)) {
    throw invalid(name, "must be 1 to 128 characters of A-Z a-z 0-9 . _ : -", 128);
  }
  return value;
}

export function timeout(name: string, value: unknown): number {
  if (typeof value !== "number" || !(value > 0) || value > MAX_TIMEOUT_MS) {
    throw invalid(name, `must be more than 0 and at most ${MAX_TIMEOUT_MS} ms, not ${String(value)}`, MAX_TIMEOUT_MS);
  }
  return value;
}

export function tokenIds(name: string, values: readonly number[]): number[] {
  if (!Array.isArray(values)) throw invalid(name, "must be a string or a list of token ids");
  return values.map((value, index) => u32(`${name}[${index}]`, value));
}

export function text(name: string, value: unknown): string {
  if (typeof value !== "string") throw invalid(name, `must be a string, not ${typeof value}`);
  if (!isWellFormed(value)) throw invalid(name, "holds a lone surrogate: it is not Unicode text");
  return value;
}

function isWellFormed(value: string): boolean {
  return !/[\uD800-\uDBFF](?![\uDC00-\uDFFF])|(?<![\uD800-\uDBFF])[\uDC00-\uDFFF]/.test(value);
}

function common(options: GenerateOptions): GenerateMessage {
  const stop = options.stop === undefined ? [] : typeof options.stop === "string" ? [options.stop] : options.stop;
  const cache = { salt: options.cacheSalt, bypass: flag("cacheBypass", options.cacheBypass) };
  return {
    context: present({ priority: optional(options.priority, (value) => integer("priority", value, -(2 ** 31), 2 ** 31 - 1)) }),
    sampling: sampling(options),
    limits: optional(options.limits, limits) ?? null,
    stop: stop.map((one, index) => text(`stop[${index}]`, one)),
    cache: cache.salt === undefined && cache.bypass === undefined ? null : present(cache),
    ...present({
      includeStop: flag("includeStop", options.includeStop),
      keepSpecialTokens: flag("keepSpecialTokens", options.keepSpecialTokens),
      echo: flag("echo", options.echo),
      model: optional(options.model, (value) => text("model", value)),
    }),
  };
}

function sampling(options: SamplingOptions): SamplingParams {
  return {
    logitBias: [...(options.logitBias ?? new Map<number, number>())].map(([tokenId, bias]) => ({
      tokenId: u32("logitBias", tokenId),
      bias: number(`logitBias[${tokenId}]`, bias),
    })),
    stopTokenIds: optional(options.stopTokenIds, (ids) => tokenIds("stopTokenIds", ids)) ?? [],
    ...present({
      repetitionPenalty: optional(options.repetitionPenalty, (value) => number("repetitionPenalty", value)),
      presencePenalty: optional(options.presencePenalty, (value) => number("presencePenalty", value)),
      frequencyPenalty: optional(options.frequencyPenalty, (value) => number("frequencyPenalty", value)),
      minTokens: optional(options.minTokens, (value) => u32("minTokens", value)),
      ignoreEos: flag("ignoreEos", options.ignoreEos),
      grammar: optional(options.grammar, grammar),
      temperature: optional(options.temperature, (value) => number("temperature", value)),
      topK: optional(options.topK, (value) => u32("topK", value)),
      topP: optional(options.topP, (value) => number("topP", value)),
      minP: optional(options.minP, (value) => number("minP", value)),
      seed: optional(options.seed, seed),
      maxTokens: optional(options.maxTokens, (value) => u32("maxTokens", value)),
      n: options.n === undefined ? undefined : answers(options),
      logprobs: optional(options.logprobs, (value) => u32("logprobs", value)),
      promptLogprobs: optional(options.promptLogprobs, (value) => u32("promptLogprobs", value)),
    }),
  };
}

function grammar(value: Grammar): { kind: GrammarKind; source: string } {
  const kind = GRAMMARS[value.kind];
  if (kind === undefined) throw invalid("grammar.kind", `must be one of ${Object.keys(GRAMMARS).join(", ")}, not ${String(value.kind)}`);
  return { kind, source: text("grammar.source", value.source ?? "") };
}

function seed(value: number | bigint): string {
  if (typeof value === "number" && !Number.isSafeInteger(value)) {
    throw invalid("seed", "must be an integer; above 2^53 - 1 it must be a bigint");
  }
  const exact = BigInt(value);
  if (exact < 0n || exact >= 1n << 64n) throw invalid("seed", "must be 0 to 2^64 - 1");
  return exact.toString();
}

function limits(value: TimeLimits): Record<string, string> {
  const names = { queueMs: "queueNs", firstTokenMs: "firstTokenNs", betweenTokensMs: "betweenTokensNs", totalMs: "totalNs" };
  checkNames("limits", value, new Set(Object.keys(names)));
  const set = Object.entries(names).flatMap(([from, to]) => {
    const ms = value[from as keyof TimeLimits];
    return ms === undefined ? [] : [[to, BigInt(Math.round(timeout(`limits.${from}`, ms) * 1e6)).toString()]];
  });
  return Object.fromEntries(set) as Record<string, string>;
}

function integer(name: string, value: unknown, low: number, high: number): number {
  if (typeof value !== "number" || !Number.isInteger(value)) throw invalid(name, `must be an integer, not ${String(value)}`);
  if (value < low || value > high) throw invalid(name, `must be ${low} to ${high}, not ${value}`, value > high ? high : low);
  return value;
}

function u32(name: string, value: unknown): number {
  return integer(name, value, 0, 2 ** 32 - 1);
}

function number(name: string, value: unknown): number {
  if (typeof value !== "number") throw invalid(name, `must be a number, not ${String(value)}`);
  return value;
}

function flag(name: string, value: unknown): boolean | undefined {
  if (value !== undefined && typeof value !== "boolean") throw invalid(name, `must be true or false, not ${String(value)}`);
  return value;
}

function json(name: string, value: unknown): string {
  const made = JSON.stringify(value);
  if (made === undefined) throw invalid(name, "is not JSON");
  return made;
}

function optional<T, R>(value: T | undefined, make: (value: T) => R): R | undefined {
  return value === undefined ? undefined : make(value);
}

/** Without what is undefined: protobufjs takes a key that is there for a field that is set. */
function present<T extends object>(value: T): T {
  return Object.fromEntries(Object.entries(value).filter(([, field]) => field !== undefined)) as T;
}
