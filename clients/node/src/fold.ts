/**
 * The events of a generation, folded into its answers. Pure.
 *
 * An answer's text is its deltas joined; nothing of an answer follows its end; a stream that ends early is an error,
 * not a short answer.
 */
import type { Accepted__Output } from "./generated/tercet/v1/Accepted.js";
import type { Finished__Output } from "./generated/tercet/v1/Finished.js";
import type { PhaseTimes__Output } from "./generated/tercet/v1/PhaseTimes.js";
import type { Resume } from "./generated/tercet/v1/Resume.js";
import type { TextDelta__Output } from "./generated/tercet/v1/TextDelta.js";
import type { TextLogprob__Output } from "./generated/tercet/v1/TextLogprob.js";
import type { TextLogprobs__Output } from "./generated/tercet/v1/TextLogprobs.js";
import type { Usage__Output } from "./generated/tercet/v1/Usage.js";
import { InternalError } from "./errors.js";
import type { GenerateEvent } from "./proto.js";
import type { Accepted, Answer, Delta, FinishReason, Logprobs, Timings, TokenLogprob, Usage } from "./types.js";


const REASONS: Readonly<Record<string, FinishReason>> = {
  FINISH_REASON_STOP: "stop",
  FINISH_REASON_LENGTH: "length",
  FINISH_REASON_TIME_LIMIT: "time_limit",
};

interface Growing {
  text: string;
  /** Unicode scalar values of `text`. */
  chars: number;
  readonly tokenIds: number[];
  readonly logprobs: Logprobs[];
  finished?: Finished__Output;
}

export class Fold {
  accepted: Accepted | undefined;
  /** True once something was delivered: from then on, sending the request again from the start would repeat it. */
  delivered = false;
  /** Of the prompt's tokens from the second on. */
  readonly promptLogprobs: Logprobs[] = [];
  private readonly growing: Growing[];

  constructor(n: number) {
    this.growing = Array.from({ length: n }, () => ({ text: "", chars: 0, tokenIds: [], logprobs: [] }));
  }

  /** Takes in one event; the delta, if it is one. An event of a newer contract is skipped. */
  apply(event: GenerateEvent): Delta | undefined {
    if (event.accepted) {
      this.accepted = readAccepted(event.accepted);
      if (this.accepted.n > 0) this.growing.splice(this.accepted.n);
      if (!this.delivered) this.promptLogprobs.length = 0; // of a try that is over: they come from the start
    } else if (event.promptLogprobs) {
      this.promptLogprobs.push(...(event.promptLogprobs.logprobs ?? []).map(readLogprobs));
    } else if (event.delta) {
      const delta = readDelta(event.delta);
      const open = this.open(delta.index);
      open.text += delta.text;
      for (const _ of delta.text) open.chars += 1;
      open.tokenIds.push(...delta.tokenIds);
      open.logprobs.push(...delta.logprobs);
      this.delivered = true;
      return delta;
    } else if (event.finished) {
      const reason = event.finished.reason ?? "FINISH_REASON_UNSPECIFIED";
      if (REASONS[reason] === undefined) throw broken(`finish reason ${reason} is unknown`);
      this.open(event.finished.index ?? 0).finished = event.finished;
      this.delivered = true;
    }
    return undefined;
  }

  get isComplete(): boolean {
    return this.growing.every((answer) => answer.finished !== undefined);
  }

  /** The stream ended with status OK. */
  complete(): void {
    const missing = this.growing.findIndex((answer) => answer.finished === undefined);
    if (missing >= 0) throw broken(`the stream ended before answer ${missing} did`);
  }

  /** What another server needs to go on; undefined where it can't. */
  soFar(): Resume | undefined {
    if (this.isComplete) return undefined;
    if (this.accepted === undefined || this.accepted.promptIds.length === 0 || this.accepted.numerics === "") return undefined;
    const [first, ...others] = this.growing.map((answer) => ({
      outputIds: [...answer.tokenIds],
      charsDelivered: answer.chars,
      finished: answer.finished !== undefined,
    }));
    return { promptIds: [...this.accepted.promptIds], numerics: this.accepted.numerics, ...first, others };
  }

  answers(): Answer[] {
    return this.growing.map((growing, index) => ({
      index,
      text: growing.text,
      tokenIds: [...growing.tokenIds],
      logprobs: [...growing.logprobs],
      ...(growing.finished === undefined ? {} : readFinished(growing.finished)),
    }));
  }

  private open(index: number): Growing {
    const growing = this.growing[index];
    if (growing === undefined) throw broken(`there is no answer ${index} of ${this.growing.length}`);
    if (growing.finished !== undefined) throw broken(`answer ${index} goes on after its end`);
    return growing;
  }
}

function broken(what: string): InternalError {
  return new InternalError("INTERNAL", `the server broke the contract: ${what}`, { reason: "CONTRACT_BROKEN" });
}

function readAccepted(accepted: Accepted__Output): Accepted {
  return {
    requestId: accepted.requestId ?? "",
    queuePosition: accepted.queuePosition ?? 0,
    seed: BigInt(accepted.seed ?? 0),
    maxTokens: accepted.maxTokens ?? 0,
    promptTokens: accepted.promptTokens ?? 0,
    promptIds: accepted.promptIds ?? [],
    numerics: accepted.numerics ?? "",
    model: accepted.model ?? "",
    n: accepted.n ?? 0,
  };
}

function readDelta(delta: TextDelta__Output): Delta {
  return {
    index: delta.index ?? 0,
    text: delta.text ?? "",
    tokenIds: delta.tokenIds ?? [],
    logprobs: (delta.logprobs ?? []).map(readLogprobs),
  };
}

function readLogprobs(row: TextLogprobs__Output): Logprobs {
  return { drawn: readLogprob(row.drawn), top: (row.top ?? []).map(readLogprob) };
}

function readLogprob(row: TextLogprob__Output | undefined | null): TokenLogprob {
  return { tokenId: row?.tokenId ?? 0, logprob: row?.logprob ?? 0, text: row?.text ?? "", bytes: row?.bytes ?? Buffer.alloc(0) };
}

function readFinished(end: Finished__Output): Partial<Answer> {
  return {
    finishReason: REASONS[end.reason ?? ""],
    stopMatch: end.stopMatch,
    usage: readUsage(end.usage ?? {}),
    timings: readTimes(end.times ?? {}),
  };
}

function readUsage(usage: Usage__Output): Usage {
  return {
    promptTokens: usage.promptTokens ?? 0,
    cachedTokens: usage.cachedTokens ?? 0,
    deliveredTokens: usage.deliveredTokens ?? 0,
    sampledTokens: usage.sampledTokens ?? 0,
    discardedTokens: usage.discardedTokens ?? 0,
    preemptions: usage.preemptions ?? 0,
    recomputedTokens: usage.recomputedTokens ?? 0,
  };
}

function readTimes(times: PhaseTimes__Output): Timings {
  const ms = (ns: string | undefined): number => Number(ns ?? 0) / 1e6;
  return {
    tokenizeMs: ms(times.tokenizeNs),
    queueMs: ms(times.queueNs),
    prefillMs: ms(times.prefillNs),
    decodeMs: ms(times.decodeNs),
    firstTokenMs: ms(times.firstTokenNs),
    totalMs: ms(times.totalNs),
  };
}
