/** A generation under way, with its retries and resumes. */
import type { ClientReadableStream, ServiceError } from "@grpc/grpc-js";
import { setTimeout as sleep } from "node:timers/promises";

import { fromServiceError, RequestCancelledError, TercetError, UnavailableError } from "./errors.js";
import { Fold } from "./fold.js";
import type { GenerateEvent, GenerateMessage } from "./proto.js";
import { Retries, type RetryPolicy } from "./retry.js";
import type { Accepted, Answer, Delta, FinishReason, Logprobs } from "./types.js";

export interface Generation {
  readonly message: GenerateMessage;
  readonly n: number;
  readonly requestId: string;
  readonly timeoutMs: number;
  /** It goes on where a server dies, for which the server has to send the prompt's ids. */
  readonly resumes: boolean;
  readonly signal?: AbortSignal;
}

/** Sends a try; deadline: milliseconds since the epoch. */
export type Send = (message: GenerateMessage, deadline: number) => ClientReadableStream<GenerateEvent>;

/**
 * Iterate it for its deltas, or await `text()` or `collect()`. It runs from the moment it is made; leaving the loop,
 * `cancel()` and the AbortSignal end it on the server. One consumer iterates.
 */
export class Stream implements AsyncIterable<Delta> {
  private readonly fold: Fold;
  private readonly retries: Retries;
  private readonly stopped = new AbortController();
  private readonly onAbort = (): void => this.cancel();
  private call: ClientReadableStream<GenerateEvent>;
  private ended = false;
  private error: TercetError | undefined;

  constructor(
    private readonly generation: Generation,
    policy: RetryPolicy,
    private readonly send: Send,
  ) {
    this.fold = new Fold(generation.n);
    this.retries = new Retries(policy, Date.now() + generation.timeoutMs);
    this.call = send(this.message(), this.retries.deadline);
    if (generation.signal?.aborted) this.cancel();
    generation.signal?.addEventListener("abort", this.onAbort, { once: true });
  }

  get requestId(): string {
    return this.generation.requestId;
  }

  /** What the server said when it queued the request. */
  get accepted(): Accepted | undefined {
    return this.fold.accepted;
  }

  /** All n answers, as far as they came. */
  get answers(): Answer[] {
    return this.fold.answers();
  }

  /** Of the prompt's tokens from the second on, where asked for. All are there before the first delta. */
  get promptLogprobs(): readonly Logprobs[] {
    return this.fold.promptLogprobs;
  }

  /** Why answer 0 ended. */
  get finishReason(): FinishReason | undefined {
    return this.fold.answers()[0]?.finishReason;
  }

  /** Times that the request was sent. */
  get attempt(): number {
    return this.retries.attempt;
  }

  /** Runs to the end; the whole text of answer `index`. */
  async text(index = 0): Promise<string> {
    return (await this.collect())[index]?.text ?? "";
  }

  /** Runs to the end; all answers. */
  async collect(): Promise<Answer[]> {
    for await (const _ of this);
    return this.answers;
  }

  /** Ends the generation, on the server too. Without effect once it has ended. */
  cancel(): void {
    if (this.ended) return;
    this.finish(new RequestCancelledError("CANCELLED", "the request was cancelled"));
    this.stopped.abort();
    this.call.on("error", () => undefined);
    this.call.cancel();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Delta, void, undefined> {
    try {
      while (!this.ended) {
        try {
          for await (const event of this.call as AsyncIterable<GenerateEvent>) {
            const delta = this.fold.apply(event);
            if (delta === undefined) continue;
            this.retries.delivered();
            yield delta;
          }
          this.fold.complete();
          this.finish(undefined);
        } catch (raw) {
          await this.again(asTercetError(raw));
        }
      }
      if (this.error !== undefined) throw this.error;
    } finally {
      this.cancel(); // the consumer left the loop
    }
  }

  /** Starts the next try, or ends the stream with the error. */
  private async again(error: TercetError): Promise<void> {
    if (this.ended) return;
    // A server that goes behind the last answer's end takes nothing away.
    if (error instanceof UnavailableError && this.fold.isComplete) return this.finish(undefined);
    const goesOn = !this.fold.delivered || this.soFar() !== undefined;
    const delay = goesOn ? this.retries.after(error, Date.now(), Math.random()) : undefined;
    if (delay === undefined) {
      this.call.cancel();
      return this.finish(error);
    }
    await sleep(delay, undefined, { signal: this.stopped.signal }).catch(() => undefined);
    if (!this.ended) this.call = this.send(this.message(), this.retries.deadline);
  }

  private soFar() {
    return this.fold.delivered && this.generation.resumes ? this.fold.soFar() : undefined;
  }

  /** Of the present try: the whole request, or what is left of it, the prompt as the ids that the server made of it. */
  private message(): GenerateMessage {
    const { message, resumes } = this.generation;
    const whole = { ...message, context: { ...message.context, attempt: this.retries.attempt }, ...(resumes ? { returnPromptIds: true } : {}) };
    const resume = this.soFar();
    if (resume === undefined) return whole;
    const { text: _text, chat: _chat, tokenIds: _ids, ...rest } = whole;
    const seed = String(this.fold.accepted?.seed);
    const n = rest.sampling?.n === undefined ? {} : { n: 1 + (resume.others?.length ?? 0) };
    return { ...rest, sampling: { ...rest.sampling, seed, ...n }, resume };
  }

  private finish(error: TercetError | undefined): void {
    if (this.ended) return;
    this.ended = true;
    this.error = error?.withFacts(this.requestId, this.retries.attempt);
    this.generation.signal?.removeEventListener("abort", this.onAbort);
  }
}

function asTercetError(raw: unknown): TercetError {
  if (raw instanceof TercetError) return raw;
  if (raw instanceof Error && "code" in raw && "metadata" in raw) return fromServiceError(raw as ServiceError);
  throw raw;
}
