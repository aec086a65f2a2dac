/**
 * An executor without a model, in one file: what a back end in another language has to do, and nothing else.
 *
 *     npm run build && node dist/examples/toy-executor.js 127.0.0.1:50053
 *     tercet conform executor 127.0.0.1:50053
 *
 * It draws the next token as a hash of all tokens before it. In the place of `draw` a real one runs its model; in the place
 * of `Slot.ids` it has keys and values, in the blocks that the scheduler gives it.
 */
import { loadPackageDefinition, Metadata, Server, ServerCredentials, status, type ServerDuplexStream, type ServerWritableStream } from "@grpc/grpc-js";
import { fromJSON, loadSync } from "@grpc/proto-loader";
import protobuf from "protobufjs";
import { createHash, randomBytes } from "node:crypto";
import { fileURLToPath } from "node:url";

import type { ProtoGrpcType } from "../src/generated/executor.js";
import type { Claim__Output as Claim } from "../src/generated/tercet/v1/Claim.js";
import type { ExecutorServiceRunRequest__Output as RunRequest } from "../src/generated/tercet/v1/ExecutorServiceRunRequest.js";
import type { ExecutorServiceRunResponse as RunResponse } from "../src/generated/tercet/v1/ExecutorServiceRunResponse.js";
import type { Slice__Output as Slice } from "../src/generated/tercet/v1/Slice.js";
import type { Step__Output as Step } from "../src/generated/tercet/v1/Step.js";

const BLOCK_SIZE = 4;
const TOTAL_BLOCKS = 256;
const MAX_BATCHED_TOKENS = 128;
const MAX_SEQUENCES = 8;
const MAX_MODEL_LEN = 256;
const VOCAB_SIZE = 1000;
const EOS = [2];
const HEARTBEAT_MS = 1000;
const INSTANCE = randomBytes(8).toString("hex");
const NAME = /^[A-Za-z0-9._:-]{1,128}$/;

const sha256 = (text: string): string => createHash("sha256").update(text).digest("hex");
const MODEL_HASH = sha256("toy model");

const DESCRIPTION = {
  model: {
    name: "toy",
    modelHash: MODEL_HASH,
    tokenizerHash: sha256("toy tokenizer"),
    maxModelLen: MAX_MODEL_LEN,
    vocabSize: VOCAB_SIZE,
    eosTokenIds: EOS,
  },
  schemaRevision: "SCHEMA_REVISION_ONE",
  numerics: "toy-1",
  blockSize: BLOCK_SIZE,
  totalBlocks: TOTAL_BLOCKS,
  maxBatchedTokens: MAX_BATCHED_TOKENS,
  maxSequences: MAX_SEQUENCES,
  capabilities: [],
  backend: "toy",
  instanceId: INSTANCE,
} as const;

/** A failure as a gRPC status, with `google.rpc.ErrorInfo` in its details. */
class Refusal extends Error {
  readonly metadata = new Metadata();

  constructor(
    readonly code: status,
    reason: string,
    message: string,
    facts: Record<string, string> = {},
    field = "",
  ) {
    super(message);
    const details = [any("google.rpc.ErrorInfo", { reason, domain: "toy", metadata: facts })];
    if (field) details.push(any("google.rpc.BadRequest", { fieldViolations: [{ field, description: message }] }));
    this.metadata.set("grpc-status-details-bin", Buffer.from(RPC.lookupType("google.rpc.Status").encode({ code, message, details }).finish()));
  }

  get details(): string {
    return this.message;
  }
}

/** What a sequence is here. ids: of the positions that are computed. drawn: the token that is to be computed next. */
interface Slot {
  ids: number[];
  blocks: number[];
  drawn: number | undefined;
}

type Stream = ServerDuplexStream<RunRequest, RunResponse>;

/** Everything between a claim and its end. */
class Session {
  private readonly slots = new Map<number, Slot>();
  private readonly beat: NodeJS.Timeout;
  private lastStep = 0;

  constructor(
    readonly owner: string,
    readonly epoch: number,
    private readonly stream: Stream,
  ) {
    stream.write({ granted: { instanceId: INSTANCE, epoch } });
    this.beat = setInterval(() => stream.write({ heartbeat: {} }), HEARTBEAT_MS);
  }

  take(step: Step): void {
    const id = Number(step.stepId ?? 0);
    if (id <= this.lastStep) return; // it came again
    if (id !== this.lastStep + 1) throw bad("STEP_GAP", `step ${id} follows step ${this.lastStep}`);
    if (Number(step.epoch ?? 0) !== this.epoch) throw new Refusal(status.FAILED_PRECONDITION, "STALE_EPOCH", `the epoch is ${this.epoch}`);
    this.lastStep = id;
    const slices = step.slices ?? [];
    this.check(slices); // the whole step before anything is changed
    const results = slices.map((slice) => this.compute(slice)).filter((result) => result !== undefined);
    this.stream.write({ result: { stepId: id, results, timings: {} } });
  }

  close(): void {
    clearInterval(this.beat);
  }

  private check(slices: Slice[]): void {
    require(slices.length > 0, "the step has no slices");
    require(new Set(slices.map((slice) => slice.slot ?? 0)).size === slices.length, "a slot comes twice");
    require(slices.reduce((sum, slice) => sum + (slice.count ?? 0), 0) <= MAX_BATCHED_TOKENS, `more than ${MAX_BATCHED_TOKENS} tokens`);
    for (const slice of slices) this.checkSlice(slice);
  }

  private checkSlice(slice: Slice): void {
    const [number, start, count] = [slice.slot ?? 0, slice.start ?? 0, slice.count ?? 0];
    const fresh = slice.newSequence ?? undefined;
    const held = fresh === undefined ? this.slots.get(number) : undefined;
    const ids = slice.tokenIds ?? [];
    const cached = fresh?.cachedTokenIds ?? [];
    require(number < MAX_SEQUENCES, `slot ${number} of ${MAX_SEQUENCES}`);
    require(count >= 1, "count is 0");
    require(fresh !== undefined || held !== undefined, `slot ${number} holds no sequence`);
    require(start === (held?.ids.length ?? cached.length), `start is ${start}, not where slot ${number} ended`);
    require(cached.length % BLOCK_SIZE === 0, "cached ids end within a block");
    if (ids.length > 0) require(ids.length === count, `${ids.length} ids for ${count} positions`);
    else require(count === 1 && held?.drawn !== undefined, "no ids, and no token drawn before");
    require([...ids, ...cached].every((id) => id < VOCAB_SIZE), "a token is outside the vocabulary");
    const blocks = [...(held?.blocks ?? []), ...(slice.newBlockIds ?? [])];
    require(blocks.every((block) => block < TOTAL_BLOCKS), `a block is beyond ${TOTAL_BLOCKS}`);
    require(new Set(blocks).size === blocks.length, "a block comes twice");
    require(start + count <= Math.min(blocks.length * BLOCK_SIZE, MAX_MODEL_LEN), "positions beyond the blocks, or the context");
    require((slice.draftTokenIds ?? []).length === 0, "drafts are not served");
    if (fresh === undefined) return;
    const sampling = fresh.sampling ?? {};
    for (const name of ["temperature", "topK", "topP", "minP", "seed", "minTokens"] as const) {
      require(sampling[name] !== undefined && sampling[name] !== null, `sampling.${name} is left open`);
    }
    require(!sampling.grammar && (fresh.promptLen ?? 0) >= 1, "a grammar, or no prompt");
  }

  private compute(slice: Slice): { slot: number; tokenIds: number[] } | undefined {
    const number = slice.slot ?? 0;
    const fresh = slice.newSequence;
    if (fresh) {
      this.slots.set(number, { ids: [...(fresh.cachedTokenIds ?? [])], blocks: [], drawn: undefined });
    }
    const slot = this.slots.get(number)!;
    slot.blocks.push(...(slice.newBlockIds ?? []));
    slot.ids.push(...(slice.tokenIds?.length ? slice.tokenIds : [slot.drawn!]));
    slot.drawn = undefined;
    if (!slice.samples) return undefined;
    slot.drawn = draw(slot.ids);
    return { slot: number, tokenIds: [slot.drawn] };
  }
}

/** A token that ends nothing, as a function of all before it. */
function draw(ids: readonly number[]): number {
  const value = createHash("sha256").update(Uint32Array.from(ids)).digest().readUInt32LE(0) % VOCAB_SIZE;
  return EOS.includes(value) ? value + 1 : value;
}

/** Who may step: one session at a time, epochs that only grow. */
class Lease {
  private session: Session | undefined;
  private stream: Stream | undefined;
  private epochs = 0;

  grant(claim: Claim, stream: Stream): Session {
    const name = claim.schedulerId ?? "";
    if (!NAME.test(name)) throw bad("INVALID_ARGUMENT", "scheduler_id must be 1 to 128 of A-Z a-z 0-9 . _ : -", "claim.scheduler_id");
    if (claim.modelHash !== MODEL_HASH) throw new Refusal(status.FAILED_PRECONDITION, "MODEL_MISMATCH", "another model is here");
    if (claim.schemaRevision !== "SCHEMA_REVISION_ONE") throw new Refusal(status.FAILED_PRECONDITION, "SCHEMA_MISMATCH", "another contract is spoken here");
    if (this.session !== undefined) {
      if (!claim.takeover) throw new Refusal(status.FAILED_PRECONDITION, "LEASE_HELD", `${this.session.owner} holds the lease`, { holder: this.session.owner });
      const ousted = this.stream!;
      this.release(this.session);
      end(ousted, new Refusal(status.FAILED_PRECONDITION, "LEASE_LOST", `${name} took the lease over`, { holder: name }));
    }
    this.epochs += 1;
    this.stream = stream;
    this.session = new Session(name, this.epochs, stream);
    return this.session;
  }

  release(session: Session | undefined): void {
    session?.close();
    if (session === this.session) this.session = this.stream = undefined;
  }
}

function run(lease: Lease, stream: Stream): void {
  let session: Session | undefined;
  let ended = false;
  const finish = (error?: Refusal): void => {
    if (ended) return;
    ended = true;
    lease.release(session);
    if (error === undefined) stream.end();
    else end(stream, error);
  };
  stream.on("data", (message: RunRequest) => {
    if (ended) return;
    try {
      if (session === undefined) {
        if (!message.claim) throw bad("INVALID_ARGUMENT", "the first message must be a claim", "claim");
        session = lease.grant(message.claim, stream);
      } else {
        if (!message.step) throw bad("INVALID_ARGUMENT", "only the first message is a claim", "step");
        session.take(message.step);
      }
    } catch (error) {
      if (error instanceof Refusal) finish(error);
      else finish(new Refusal(status.INTERNAL, "STEP_FAILED", "the step failed"));
    }
  });
  stream.on("end", () => finish());
  stream.on("cancelled", () => finish());
  stream.on("error", () => finish());
}

function end(stream: Stream, error: Refusal): void {
  stream.emit("error", { code: error.code, details: error.message, metadata: error.metadata });
}

function bad(reason: string, message: string, field = "step"): Refusal {
  return new Refusal(status.INVALID_ARGUMENT, reason, message, {}, field);
}

function require(holds: boolean, message: string): void {
  if (!holds) throw bad("BAD_STEP", message);
}

const RPC = protobuf.parse(`
  syntax = "proto3";
  package google.rpc;
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }
  message BadRequest { message FieldViolation { string field = 1; string description = 2; } repeated FieldViolation field_violations = 1; }
`).root;

function any(type: string, value: Record<string, unknown>): { typeUrl: string; value: Uint8Array } {
  return { typeUrl: `type.googleapis.com/${type}`, value: RPC.lookupType(type).encode(value).finish() };
}

const HEALTH = protobuf.parse(`
  syntax = "proto3";
  package grpc.health.v1;
  message HealthCheckRequest { string service = 1; }
  message HealthCheckResponse { enum ServingStatus { UNKNOWN = 0; SERVING = 1; NOT_SERVING = 2; SERVICE_UNKNOWN = 3; } ServingStatus status = 1; }
  service Health { rpc Check(HealthCheckRequest) returns (HealthCheckResponse); rpc Watch(HealthCheckRequest) returns (stream HealthCheckResponse); }
`).root;
const SERVED = ["", "liveness", "tercet.v1.ExecutorService"];

/** Serves at `address` until the process ends; resolves to the port. */
export function serve(address: string): Promise<{ server: Server; port: number }> {
  const protos = fileURLToPath(new URL("../protos", import.meta.url));
  const options = { longs: String, enums: String, oneofs: true, includeDirs: [protos] };
  const { tercet } = loadPackageDefinition(loadSync("tercet/v1/executor.proto", options)) as unknown as ProtoGrpcType;
  const health = loadPackageDefinition(fromJSON(HEALTH.toJSON(), { enums: String })) as any; // eslint-disable-line
  const lease = new Lease();
  const server = new Server();
  server.addService(tercet.v1.ExecutorService.service, {
    Describe: (_call: unknown, done: (error: null, reply: typeof DESCRIPTION) => void) => done(null, DESCRIPTION),
    Run: (stream: Stream) => run(lease, stream),
  });
  server.addService(health.grpc.health.v1.Health.service, {
    Check: (call: { request: { service?: string } }, done: (error: object | null, reply?: object) => void) => {
      if (SERVED.includes(call.request.service ?? "")) done(null, { status: "SERVING" });
      else done({ code: status.NOT_FOUND, details: "no such service here" });
    },
    Watch: (stream: ServerWritableStream<{ service?: string }, object>) => {
      stream.write({ status: SERVED.includes(stream.request.service ?? "") ? "SERVING" : "SERVICE_UNKNOWN" });
    },
  });
  return new Promise((resolve, reject) => {
    server.bindAsync(address, ServerCredentials.createInsecure(), (error, port) => (error === null ? resolve({ server, port }) : reject(error)));
  });
}

const [address] = process.argv.slice(2);
if (address !== undefined && process.argv[1] === fileURLToPath(import.meta.url)) {
  const { server, port } = await serve(address);
  console.log(JSON.stringify({ message: "listening", address, port }));
  process.once("SIGTERM", () => server.forceShutdown());
}
