/**
 * Every failure of the SDK: one class per kind, all of them `TercetError`.
 *
 * Reads the `google.rpc` details that Tercet's servers send (ErrorInfo, BadRequest, RetryInfo, RequestInfo). Broken or
 * missing details lose facts, never the class.
 */
import { status, type ServiceError } from "@grpc/grpc-js";
import protobuf from "protobufjs";

/** What is known of a failure besides its message. */
export interface ErrorDetails {
  /** UPPER_SNAKE, stable, for programs. */
  readonly reason?: string;
  /** The request field at fault. */
  readonly field?: string;
  /** The bound that the field broke. */
  readonly limit?: string;
  readonly requestId?: string;
  /** Milliseconds that the server asks to wait. */
  readonly retryAfterMs?: number;
  /** Times that the request was sent. */
  readonly attempts?: number;
  readonly metadata?: Readonly<Record<string, string>>;
}

export class TercetError extends Error {
  /** gRPC's name of the status, such as "UNAVAILABLE". */
  readonly code: string;
  readonly details: ErrorDetails;

  constructor(code: string, message: string, details: ErrorDetails = {}) {
    super(message);
    this.name = new.target.name;
    this.code = code;
    this.details = details;
  }

  /** UPPER_SNAKE; the code where the server named none. */
  get reason(): string {
    return this.details.reason ?? this.code;
  }

  get field(): string | undefined {
    return this.details.field;
  }

  get limit(): string | undefined {
    return this.details.limit;
  }

  get requestId(): string | undefined {
    return this.details.requestId;
  }

  get retryAfterMs(): number | undefined {
    return this.details.retryAfterMs;
  }

  /** Whether the same request can succeed later, unchanged. */
  get retryable(): boolean {
    return this.retryAfterMs !== undefined;
  }

  /** The same failure with what only the caller knows; facts that are there stay. */
  withFacts(requestId: string, attempts: number): TercetError {
    const kind = this.constructor as ErrorClass;
    const known = this.details;
    const merged = { ...known, requestId: known.requestId ?? requestId, attempts: known.attempts ?? attempts };
    return new kind(this.code, this.message, merged);
  }
}

/** The request can never succeed as it is; `field` and `limit` say what to change. */
export class InvalidArgumentError extends TercetError {}
/** The contract has it, this server does not serve it. */
export class UnimplementedError extends TercetError {}
/** Another model is served than the one asked for. */
export class NotFoundError extends TercetError {}
/** A live request has the same id. */
export class AlreadyExistsError extends TercetError {}
/** A queue, quota or buffer is full; `retryAfterMs` is the server's estimate of when it is not. */
export class ResourceExhaustedError extends TercetError {}
/** A time limit passed before the first token, or the answer did not come in time. */
export class DeadlineExceededError extends TercetError {}
/** Nobody can serve this now: the server is gone, drains, or has no executor. */
export class UnavailableError extends TercetError {
  override get retryable(): boolean {
    return true;
  }
}
/** Cancelled: by `cancel()`, by an AbortSignal, by closing the client, or by the server. */
export class RequestCancelledError extends TercetError {}
/** The request could not go on. */
export class AbortedError extends TercetError {}
/** Client or server are not in a state that allows this. */
export class FailedPreconditionError extends TercetError {}
/** The key may not do this. */
export class PermissionDeniedError extends TercetError {}
/** The key is missing or unknown. */
export class UnauthenticatedError extends TercetError {}
/** A defect of the server, or a peer that breaks the contract. */
export class InternalError extends TercetError {}

type ErrorClass = new (code: string, message: string, details?: ErrorDetails) => TercetError;

const ERROR_OF: Readonly<Record<string, ErrorClass>> = {
  INVALID_ARGUMENT: InvalidArgumentError,
  UNIMPLEMENTED: UnimplementedError,
  NOT_FOUND: NotFoundError,
  ALREADY_EXISTS: AlreadyExistsError,
  RESOURCE_EXHAUSTED: ResourceExhaustedError,
  DEADLINE_EXCEEDED: DeadlineExceededError,
  UNAVAILABLE: UnavailableError,
  CANCELLED: RequestCancelledError,
  ABORTED: AbortedError,
  FAILED_PRECONDITION: FailedPreconditionError,
  PERMISSION_DENIED: PermissionDeniedError,
  UNAUTHENTICATED: UnauthenticatedError,
  INTERNAL: InternalError,
  // Never sent by Tercet, but by proxies and other gRPC stacks; `code` still tells them apart.
  OUT_OF_RANGE: InvalidArgumentError,
};

// grpc-js calls a connection that broke under a call INTERNAL, with a text that only it writes.
const BROKEN_CONNECTION = /^Received RST_STREAM with code \d+ triggered by internal client error/;

/** The error of a failed call. */
export function fromServiceError(error: ServiceError): TercetError {
  const broken = error.code === status.INTERNAL && BROKEN_CONNECTION.test(error.details);
  const code = broken ? "UNAVAILABLE" : (status[error.code] ?? "UNKNOWN");
  const packed = error.metadata?.get("grpc-status-details-bin")[0];
  return fromStatus(code, error.details, Buffer.isBuffer(packed) ? packed : undefined);
}

/** The error of a status's name, its message and, where the peer sent them, its details (a google.rpc.Status). */
export function fromStatus(code: string, message: string, packed?: Buffer): TercetError {
  const kind = ERROR_OF[code] ?? InternalError;
  return new kind(code, message || code, packed === undefined ? {} : readDetails(packed));
}

export function invalid(field: string, problem: string, limit?: number): InvalidArgumentError {
  return new InvalidArgumentError("INVALID_ARGUMENT", `${field} ${problem}`, {
    reason: "INVALID_ARGUMENT",
    field,
    ...(limit === undefined ? {} : { limit: String(limit) }),
  });
}

const METADATA: protobuf.IMapField = { keyType: "string", type: "string", id: 3 };
// Of googleapis' google/rpc/status.proto and error_details.proto, the fields that Tercet sends, by number.
const rpc = protobuf.Root.fromJSON({
  nested: {
    Any: { fields: { typeUrl: { type: "string", id: 1 }, value: { type: "bytes", id: 2 } } },
    Status: { fields: { details: { rule: "repeated", type: "Any", id: 3 } } },
    ErrorInfo: { fields: { reason: { type: "string", id: 1 }, metadata: METADATA } },
    FieldViolation: { fields: { field: { type: "string", id: 1 } } },
    BadRequest: { fields: { fieldViolations: { rule: "repeated", type: "FieldViolation", id: 1 } } },
    Duration: { fields: { seconds: { type: "int64", id: 1 }, nanos: { type: "int32", id: 2 } } },
    RetryInfo: { fields: { retryDelay: { type: "Duration", id: 1 } } },
    RequestInfo: { fields: { requestId: { type: "string", id: 1 } } },
  },
});

function read<T>(name: string, bytes: Uint8Array): T {
  const type = rpc.lookupType(name);
  return type.toObject(type.decode(bytes), { longs: Number, defaults: true, arrays: true }) as T;
}

const DETAILS: Readonly<Record<string, (bytes: Uint8Array) => ErrorDetails>> = {
  ErrorInfo: (bytes) => {
    const info = read<{ reason: string; metadata?: Record<string, string> }>("ErrorInfo", bytes);
    const { limit, ...metadata } = info.metadata ?? {};
    return { reason: info.reason || undefined, limit, metadata };
  },
  BadRequest: (bytes) => {
    const bad = read<{ fieldViolations: { field: string }[] }>("BadRequest", bytes);
    return { field: bad.fieldViolations[0]?.field };
  },
  RetryInfo: (bytes) => {
    const { retryDelay } = read<{ retryDelay: { seconds: number; nanos: number } | null }>("RetryInfo", bytes);
    return retryDelay === null ? {} : { retryAfterMs: Math.max(0, retryDelay.seconds * 1e3 + retryDelay.nanos / 1e6) };
  },
  RequestInfo: (bytes) => ({ requestId: read<{ requestId: string }>("RequestInfo", bytes).requestId || undefined }),
};

function readDetails(packed: Buffer): ErrorDetails {
  let details: ErrorDetails = {};
  try {
    for (const any of read<{ details: { typeUrl: string; value: Uint8Array }[] }>("Status", packed).details) {
      const merge = DETAILS[any.typeUrl.replace(/^.*\/google\.rpc\./, "")];
      if (merge !== undefined) details = { ...details, ...merge(any.value) };
    }
  } catch {
    // A peer that sends what is no google.rpc.Status: what was read so far stands.
  }
  return details;
}
