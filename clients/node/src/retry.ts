/** Whether and when a failed call is sent again. Pure: time and randomness are arguments. */
import { ResourceExhaustedError, UnavailableError, type TercetError } from "./errors.js";

/** When a failed call is sent again: on UNAVAILABLE, within the call's time limit. */
export interface RetryPolicy {
  /** Sends at most with nothing delivered in between; 1: no retry. */
  readonly attempts: number;
  /** Milliseconds; it doubles up to `maxBackoffMs`, with 20 % jitter, and is never below what the server asks for. */
  readonly initialBackoffMs: number;
  readonly maxBackoffMs: number;
  /** Also RESOURCE_EXHAUSTED, where the server says when to come back. */
  readonly resourceExhausted: boolean;
}

export const DEFAULT_RETRY: RetryPolicy = {
  attempts: 5,
  initialBackoffMs: 100,
  maxBackoffMs: 5_000,
  resourceExhausted: false,
};

/** One call's tries. None starts at or after the deadline (milliseconds, on the clock that `now` is read from). */
export class Retries {
  /** Number of the present try, from 1. */
  attempt = 1;
  private inARow = 1;

  constructor(
    private readonly policy: RetryPolicy,
    readonly deadline: number,
  ) {}

  /** The present try has brought something. */
  delivered(): void {
    this.inARow = 1;
  }

  /** Milliseconds to wait before the next try, which `attempt` then counts; undefined: the error stands. */
  after(error: TercetError, now: number, jitter: number): number | undefined {
    if (!this.mayRepeat(error) || this.inARow >= this.policy.attempts) return undefined;
    const backoff = Math.min(this.policy.maxBackoffMs, this.policy.initialBackoffMs * 2 ** (this.inARow - 1));
    const delay = Math.max(backoff * (0.8 + 0.4 * jitter), error.retryAfterMs ?? 0);
    if (delay >= this.deadline - now) return undefined;
    this.attempt += 1;
    this.inARow += 1;
    return delay;
  }

  private mayRepeat(error: TercetError): boolean {
    if (error instanceof UnavailableError) return true;
    return error instanceof ResourceExhaustedError && error.retryAfterMs !== undefined && this.policy.resourceExhausted;
  }
}
