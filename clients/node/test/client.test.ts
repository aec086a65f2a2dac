import { Metadata, status } from "@grpc/grpc-js";
import assert from "node:assert/strict";
import { test, type TestContext } from "node:test";
import protobuf from "protobufjs";

import * as tercet from "../src/index.js";
import { accepted, delta, fails, finished, plays, Scripted, type Script } from "./scripted.js";

const QUICK = { initialBackoffMs: 1, maxBackoffMs: 2 };

async function connected(t: TestContext, scripts: Script[], options: tercet.ClientOptions = {}) {
  const server = await new Scripted(scripts).start();
  const client = new tercet.Client(server.target, { retry: QUICK, timeoutMs: 5_000, ...options });
  t.after(() => {
    client.close();
    server.stop();
  });
  return { server, client };
}

test("deltas come one by one, and make the text", async (t) => {
  const { client, server } = await connected(t, [plays(accepted(), delta("Pa", 1), delta("ris", 2), finished())]);
  const stream = client.chat([{ role: "user", content: "capital?" }], { temperature: 0, maxTokens: 4, seed: 2n ** 64n - 1n });
  const seen: string[] = [];
  for await (const one of stream) seen.push(one.text);
  assert.deepEqual(seen, ["Pa", "ris"]);
  assert.equal(await stream.text(), "Paris");
  assert.equal(stream.finishReason, "stop");
  assert.equal(stream.accepted?.seed, 2n ** 64n - 1n);
  assert.equal(stream.answers[0]?.usage?.deliveredTokens, 2);
  assert.equal(stream.answers[0]?.timings?.totalMs, 2);
  assert.equal(server.messages[0]?.sampling?.temperature, 0, "an explicit zero is sent");
  assert.equal(server.messages[0]?.sampling?._topP, undefined, "what is absent is not");
});

test("who asks travels as metadata", async (t) => {
  const { client, server } = await connected(t, [plays(accepted(), finished())], {
    apiKey: "key", tenant: "acme", metadata: () => ({ traceparent: "00-1-2-01" }),
  });
  await client.generate("x", { requestId: "mine", priority: -3 }).collect();
  const sent = server.metadata[0]?.getMap();
  assert.equal(sent?.["authorization"], "Bearer key");
  assert.equal(sent?.["tercet-tenant"], "acme");
  assert.equal(sent?.["tercet-request-id"], "mine");
  assert.equal(sent?.["traceparent"], "00-1-2-01");
  assert.equal(server.messages[0]?.context?.priority, -3);
});

test("a server that is away is asked again, under the same id", async (t) => {
  const { client, server } = await connected(t, [fails(status.UNAVAILABLE), plays(accepted(), delta("a", 1), finished())]);
  const stream = client.generate("x");
  assert.equal(await stream.text(), "a");
  assert.equal(stream.attempt, 2);
  assert.deepEqual(server.messages.map((message) => message.context?.attempt), [1, 2]);
  const ids = server.metadata.map((metadata) => metadata.get("tercet-request-id")[0]);
  assert.equal(ids[0], ids[1]);
});

test("a server that dies in mid-answer: it goes on behind what was delivered, nothing twice", async (t) => {
  const emoji = "\u{1F642}";
  const { client, server } = await connected(t, [
    fails(status.UNAVAILABLE, [accepted(), delta(`a${emoji}`, 1, 2)]),
    plays(accepted(), delta("b", 3), finished()),
  ]);
  const stream = client.generate("x");
  assert.equal(await stream.text(), `a${emoji}b`);
  assert.deepEqual(stream.answers[0]?.tokenIds, [1, 2, 3]);
  const second = server.messages[1];
  assert.deepEqual(second?.resume?.outputIds, [1, 2]);
  assert.deepEqual(second?.resume?.promptIds, [7, 8]);
  assert.equal(second?.resume?.charsDelivered, "2", "characters are Unicode scalar values, not UTF-16 units");
  assert.equal(second?.sampling?.seed, "18446744073709551615");
  assert.equal(second?.text, undefined);
});

test("a connection that breaks under a call is a server that is away", () => {
  const raw = (details: string) => Object.assign(new Error(), { code: status.INTERNAL, details, metadata: new Metadata() });
  const text = "Received RST_STREAM with code 2 triggered by internal client error: Session closed with error code 2";
  assert.ok(tercet.fromServiceError(raw(text)) instanceof tercet.UnavailableError);
  assert.ok(tercet.fromServiceError(raw("a defect")) instanceof tercet.InternalError);
});

test("without resume a death after the first delta is an error", async (t) => {
  const dying = fails(status.UNAVAILABLE, [accepted(), delta("a", 1)]);
  const { client } = await connected(t, [dying, dying], { resume: false });
  await assert.rejects(client.generate("x").collect(), tercet.UnavailableError);
});

test("each of several answers goes on behind what came of it", async (t) => {
  const of = (index: number, text: string, ...tokenIds: number[]) => ({ delta: { index, text, tokenIds } });
  const end = (index: number) => ({ finished: { index, reason: "FINISH_REASON_STOP", usage: {}, times: {} } });
  const scored = (tokenId: number) => ({ promptLogprobs: { logprobs: [{ drawn: { tokenId, logprob: -0.5 }, top: [] }] } });
  const { client, server } = await connected(t, [
    fails(status.UNAVAILABLE, [accepted({ n: 3 }), scored(8), of(1, "b", 7), of(2, "cd", 8), end(2)]),
    plays(accepted({ n: 3 }), of(0, "a", 5), of(1, "B", 6), end(0), end(1)),
  ]);
  const stream = client.generate("x", { n: 4, promptLogprobs: 0 });
  const answers = await stream.collect();
  assert.deepEqual(answers.map((answer) => [answer.text, answer.tokenIds]), [["a", [5]], ["bB", [7, 6]], ["cd", [8]]]);
  assert.deepEqual(stream.promptLogprobs.map((row) => row.drawn.tokenId), [8]);
  const second = server.messages[1];
  assert.equal(second?.sampling?.n, 3, "as many as were promised");
  assert.deepEqual(second?.resume?.others?.map((one) => [one.outputIds, one.charsDelivered, one.finished]), [
    [[7], "1", false],
    [[8], "2", true],
  ]);
});

test("tries are bounded, and the error tells their number", async (t) => {
  const { client, server } = await connected(t, [], { retry: { ...QUICK, attempts: 3 } });
  await assert.rejects(client.generate("x").collect(), (error: tercet.TercetError) => {
    assert.ok(error instanceof tercet.UnavailableError);
    assert.equal(error.details.attempts, 3);
    assert.equal(error.retryable, true);
    return true;
  });
  assert.equal(server.messages.length, 3);
});

test("a stream that ends early is an error, not a short answer", async (t) => {
  const { client } = await connected(t, [plays(accepted(), delta("a", 1))]);
  await assert.rejects(client.generate("x").collect(), { reason: "CONTRACT_BROKEN" });
});

test("an error of the server has its facts", async (t) => {
  const { client } = await connected(t, [fails(status.RESOURCE_EXHAUSTED, [], packedStatus())]);
  await assert.rejects(client.generate("x").collect(), (error: tercet.TercetError) => {
    assert.ok(error instanceof tercet.ResourceExhaustedError);
    assert.equal(error.reason, "QUEUE_FULL");
    assert.equal(error.limit, "1024");
    assert.equal(error.retryAfterMs, 1_500);
    assert.equal(error.field, "prompt");
    return true;
  });
});

test("broken details lose facts, never the class", async (t) => {
  const { client } = await connected(t, [fails(status.RESOURCE_EXHAUSTED, [], Buffer.from([0x1a, 0xff, 0xff]))]);
  await assert.rejects(client.generate("x").collect(), tercet.ResourceExhaustedError);
});

test("leaving the loop ends the work on the server", async (t) => {
  const endless: Script = (call) => {
    call.write(accepted());
    const timer = setInterval(() => call.write(delta("a", 1)), 2);
    call.on("cancelled", () => clearInterval(timer));
  };
  const { client, server } = await connected(t, [endless, endless, endless]);
  for await (const _ of client.generate("x")) break;
  const controller = new AbortController();
  const aborted = client.generate("x", { signal: controller.signal });
  await assert.rejects(async () => {
    for await (const _ of aborted) controller.abort();
  }, tercet.RequestCancelledError);
  const closing = client.generate("x");
  await assert.rejects(async () => {
    for await (const _ of closing) client.close();
  }, tercet.RequestCancelledError);
  while (server.cancelled < 3) await new Promise((resolve) => setTimeout(resolve, 5));
  assert.throws(() => client.generate("x"), tercet.FailedPreconditionError);
});

test("the time limit holds over all tries", async (t) => {
  const silent: Script = () => undefined;
  const { client } = await connected(t, [silent]);
  await assert.rejects(client.generate("x", { timeoutMs: 100 }).collect(), tercet.DeadlineExceededError);
});

test("unary calls", async (t) => {
  const { client } = await connected(t, []);
  assert.deepEqual(await client.tokenize("ab"), [97, 98]);
  assert.equal((await client.describe()).model, "m");
  await assert.rejects(client.detokenize([1]), tercet.UnimplementedError);
  await assert.rejects(client.renderChat([{ role: "user", content: "x" }]), tercet.UnavailableError);
  await assert.rejects(client.tokenize("x", { signal: AbortSignal.abort() }), tercet.RequestCancelledError);
});

const REFUSED: [string, (client: tercet.Client) => unknown][] = [
  ["maxTokens", (client) => client.generate("x", { maxTokens: -1 })],
  ["maxTokens", (client) => client.generate("x", { maxTokens: 1.5 })],
  ["n", (client) => client.generate("x", { n: 129 })],
  ["seed", (client) => client.generate("x", { seed: 2 ** 53 })],
  ["seed", (client) => client.generate("x", { seed: 1n << 64n })],
  ["prompt", (client) => client.generate("\ud800")],
  ["prompt[1]", (client) => client.generate([1, -1])],
  ["temprature", (client) => client.generate("x", { temprature: 1 } as object)],
  ["messages", (client) => client.chat([])],
  ["messages[0].content", (client) => client.chat([{ role: "user" } as unknown as tercet.Message])],
  ["requestId", (client) => client.generate("x", { requestId: "no spaces" })],
  ["timeoutMs", (client) => client.generate("x", { timeoutMs: 0 })],
  ["grammar.kind", (client) => client.generate("x", { grammar: { kind: "perl" } as unknown as tercet.Grammar })],
  ["limits.queueMs", (client) => client.generate("x", { limits: { queueMs: -1 } })],
];

for (const [field, call] of REFUSED) {
  test(`refused before anything is sent: ${field}`, async (t) => {
    const { client, server } = await connected(t, []);
    assert.throws(() => call(client), (error: tercet.TercetError) => error instanceof tercet.InvalidArgumentError && error.field === field);
    assert.equal(server.messages.length, 0);
  });
}

test("targets and keys are checked", () => {
  for (const target of ["http://localhost:1", "localhost", "localhost:0", "localhost:99999", "unix:", `unix:/${"x".repeat(200)}`]) {
    assert.throws(() => new tercet.Client(target), tercet.InvalidArgumentError, target);
  }
  assert.throws(() => new tercet.Client("example.org:443", { apiKey: "k" }), { field: "apiKey" });
  for (const [target, options] of [
    ["example.org:443", { apiKey: "k", tls: true }],
    ["127.0.0.1:1", { apiKey: "k" }],
    ["[::1]:1", { apiKey: "k" }],
    ["dns:///localhost:1", { apiKey: "k" }],
  ] as const) {
    new tercet.Client(target, options).close();
  }
});

function packedStatus(): Buffer {
  const root = protobuf.parse(`syntax = "proto3"; message Any { string type_url = 1; bytes value = 2; }
    message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
    message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }
    message Violation { string field = 1; } message BadRequest { repeated Violation field_violations = 1; }
    message Duration { int64 seconds = 1; int32 nanos = 2; } message RetryInfo { Duration retry_delay = 1; }`).root;
  const pack = (name: string, value: object) => ({
    typeUrl: `type.googleapis.com/google.rpc.${name}`,
    value: root.lookupType(name).encode(root.lookupType(name).fromObject(value)).finish(),
  });
  const details = [
    pack("ErrorInfo", { reason: "QUEUE_FULL", metadata: { limit: "1024" } }),
    pack("RetryInfo", { retryDelay: { seconds: 1, nanos: 500_000_000 } }),
    pack("BadRequest", { fieldViolations: [{ field: "prompt" }] }),
    { typeUrl: "type.googleapis.com/google.rpc.Unheard", value: new Uint8Array([1]) },
  ];
  return Buffer.from(root.lookupType("Status").encode({ details } as object).finish());
}
