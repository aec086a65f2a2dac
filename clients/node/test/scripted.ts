/** A tokenizer that plays scripts: what the client does with each reply of a server is seen here, without one. */
import { Metadata, Server, ServerCredentials, status, type ServerWritableStream } from "@grpc/grpc-js";
import { rmSync } from "node:fs";
import { mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { TokenizerService, type GenerateMessage } from "../src/proto.js";

type Call = ServerWritableStream<GenerateMessage, object>;
export type Script = (call: Call) => void | Promise<void>;

export const accepted = (more: object = {}): object => ({
  accepted: { requestId: "r", seed: "18446744073709551615", promptTokens: 2, promptIds: [7, 8], numerics: "same", ...more },
});
export const delta = (text: string, ...tokenIds: number[]): object => ({ delta: { text, tokenIds } });
export const finished = (reason = "FINISH_REASON_STOP"): object => ({
  finished: { reason, usage: { promptTokens: 2, deliveredTokens: 2 }, times: { totalNs: "2000000" } },
});

export function plays(...events: object[]): Script {
  return (call) => {
    for (const event of events) call.write(event);
    call.end();
  };
}

/** Writes the events, then ends with the status once they are out. */
export function fails(code: status, events: object[] = [], details?: Buffer): Script {
  return async (call) => {
    for (const event of events) call.write(event);
    await new Promise((resolve) => setTimeout(resolve, 20));
    const metadata = new Metadata();
    if (details !== undefined) metadata.set("grpc-status-details-bin", details);
    call.emit("error", Object.assign(new Error("scripted"), { code, details: "scripted", metadata }));
  };
}

export class Scripted {
  readonly messages: GenerateMessage[] = [];
  readonly metadata: Metadata[] = [];
  cancelled = 0;
  private readonly server = new Server();
  private readonly folder = mkdtempSync(join(tmpdir(), "tercet-node-"));

  constructor(private readonly scripts: Script[]) {
    this.server.addService(TokenizerService.service, {
      Generate: (call: Call) => {
        this.messages.push(call.request);
        this.metadata.push(call.metadata);
        call.on("cancelled", () => (this.cancelled += 1));
        void (this.scripts.shift() ?? fails(status.UNAVAILABLE))(call);
      },
      Tokenize: (call: { request: { text: string } }, done: (error: null, reply: object) => void) =>
        done(null, { tokenIds: Array.from(Buffer.from(call.request.text)) }),
      Detokenize: (_: unknown, done: (error: object) => void) => done({ code: status.UNIMPLEMENTED, details: "not here" }),
      RenderChat: (_: unknown, done: (error: object) => void) => done({ code: status.UNAVAILABLE, details: "away" }),
      Describe: (_: unknown, done: (error: null, reply: object) => void) => done(null, { model: { name: "m" }, numerics: "same" }),
      GetTokenizer: (call: Call) => call.end(),
    });
  }

  get target(): string {
    return `unix:${join(this.folder, "s")}`;
  }

  async start(): Promise<this> {
    await new Promise<void>((resolve, reject) =>
      this.server.bindAsync(this.target, ServerCredentials.createInsecure(), (error) => (error ? reject(error) : resolve())),
    );
    return this;
  }

  stop(): void {
    this.server.forceShutdown();
    rmSync(this.folder, { recursive: true, force: true });
  }
}
