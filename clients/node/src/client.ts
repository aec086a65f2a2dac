/** The connection to a server, and its calls. */
import { credentials, Metadata, type ChannelCredentials, type ServiceError } from "@grpc/grpc-js";
import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";

import { FailedPreconditionError, fromServiceError, invalid, RequestCancelledError } from "./errors.js";
import type { TokenizerServiceDescribeRequest as DescribeRequest } from "./generated/tercet/v1/TokenizerServiceDescribeRequest.js";
import type { TokenizerServiceDescribeResponse__Output as DescribeReply } from "./generated/tercet/v1/TokenizerServiceDescribeResponse.js";
import type { TokenizerServiceDetokenizeRequest as DetokenizeRequest } from "./generated/tercet/v1/TokenizerServiceDetokenizeRequest.js";
import type { TokenizerServiceDetokenizeResponse__Output as DetokenizeReply } from "./generated/tercet/v1/TokenizerServiceDetokenizeResponse.js";
import type { TokenizerServiceRenderChatRequest as RenderChatRequest } from "./generated/tercet/v1/TokenizerServiceRenderChatRequest.js";
import type { TokenizerServiceRenderChatResponse__Output as RenderChatReply } from "./generated/tercet/v1/TokenizerServiceRenderChatResponse.js";
import type { TokenizerServiceTokenizeRequest as TokenizeRequest } from "./generated/tercet/v1/TokenizerServiceTokenizeRequest.js";
import type { TokenizerServiceTokenizeResponse__Output as TokenizeReply } from "./generated/tercet/v1/TokenizerServiceTokenizeResponse.js";
import { TokenizerService, type GenerateMessage, type Stub } from "./proto.js";
import * as request from "./request.js";
import { DEFAULT_RETRY, Retries, type RetryPolicy } from "./retry.js";
import { Stream } from "./stream.js";
import { channelOptions, checkTarget, isLocal } from "./target.js";
import type { CallOptions, ChatOptions, GenerateOptions, Message, RenderedChat, ServerDescription } from "./types.js";

const DEFAULT_TIMEOUT_MS = 120_000;

export interface ClientOptions {
  /** True: TLS with the root certificates of Node. Credentials: your own, for other roots or mTLS. */
  readonly tls?: boolean | ChannelCredentials;
  /** Sent as `authorization: Bearer`; refused without TLS unless the server is on this machine. */
  readonly apiKey?: string;
  /** Lifts that, for networks that encrypt by themselves. */
  readonly plaintextApiKey?: boolean;
  readonly tenant?: string;
  /** Milliseconds for each call that does not say otherwise. */
  readonly timeoutMs?: number;
  readonly retry?: Partial<RetryPolicy>;
  /** False: a generation whose server dies after the first delta fails instead of going on at the next. */
  readonly resume?: boolean;
  /** Headers of every call, such as a trace context: called once for each. */
  readonly metadata?: () => Readonly<Record<string, string>>;
}

type Unary<Q, R> = (
  ...call: [message: Q, metadata: Metadata, options: { deadline: number }, done: (error: ServiceError | null, reply?: R) => void]
) => { cancel(): void };

/** Make one and keep it: it holds one connection for any number of calls at once. */
export class Client {
  private readonly stub: Stub;
  private readonly retry: RetryPolicy;
  private readonly live = new Set<{ cancel(): void }>();
  private closed = false;

  constructor(
    readonly target: string,
    private readonly options: ClientOptions = {},
  ) {
    checkTarget(target);
    const secure = options.tls !== undefined && options.tls !== false;
    if (options.apiKey !== undefined && !secure && !isLocal(target) && options.plaintextApiKey !== true) {
      throw invalid("apiKey", `would travel to ${target} unencrypted; set tls: true, or plaintextApiKey: true`);
    }
    if (options.tenant !== undefined) request.requestId("tenant", options.tenant);
    if (options.timeoutMs !== undefined) request.timeout("timeoutMs", options.timeoutMs);
    this.retry = { ...DEFAULT_RETRY, ...options.retry };
    const channel = typeof options.tls === "object" ? options.tls : secure ? credentials.createSsl() : credentials.createInsecure();
    this.stub = new TokenizerService(target, channel, channelOptions(target));
  }

  /** Goes on from a text, or from token ids. */
  generate(prompt: string | readonly number[], options: GenerateOptions = {}): Stream {
    return this.stream(request.generateMessage(prompt, options), options);
  }

  /** Answers a conversation, oldest message first. */
  chat(messages: readonly Message[], options: ChatOptions = {}): Stream {
    return this.stream(request.chatMessage(messages, options), options);
  }

  /** Text to token ids. Control tokens written in it stay text. */
  async tokenize(text: string, options: CallOptions & { addSpecialTokens?: boolean } = {}): Promise<number[]> {
    const { addSpecialTokens, ...call } = options;
    const message = { text: request.text("text", text), ...(addSpecialTokens === undefined ? {} : { addSpecialTokens }) };
    const reply = await this.unary<TokenizeRequest, TokenizeReply>("tokenize", (...call) => this.stub.Tokenize(...call), message, call);
    return reply.tokenIds ?? [];
  }

  /** Token ids to text; what is not UTF-8 becomes U+FFFD. */
  async detokenize(ids: readonly number[], options: CallOptions & { keepSpecialTokens?: boolean } = {}): Promise<string> {
    const { keepSpecialTokens, ...call } = options;
    const message = { tokenIds: request.tokenIds("tokenIds", ids), ...(keepSpecialTokens === undefined ? {} : { keepSpecialTokens }) };
    const reply = await this.unary<DetokenizeRequest, DetokenizeReply>("detokenize", (...call) => this.stub.Detokenize(...call), message, call);
    return reply.text ?? "";
  }

  /** What the model would read of a conversation. */
  async renderChat(messages: readonly Message[], options: CallOptions & Pick<ChatOptions, "addGenerationPrompt" | "tools"> = {}): Promise<RenderedChat> {
    const { addGenerationPrompt, tools, ...call } = options;
    const message = { chat: request.chatPrompt(messages, { addGenerationPrompt, tools }) };
    const reply = await this.unary<RenderChatRequest, RenderChatReply>("renderChat", (...call) => this.stub.RenderChat(...call), message, call);
    return { text: reply.text ?? "", tokenIds: reply.tokenIds ?? [] };
  }

  /** What is served. */
  async describe(options: CallOptions = {}): Promise<ServerDescription> {
    const reply = await this.unary<DescribeRequest, DescribeReply>("describe", (...call) => this.stub.Describe(...call), {}, options);
    return {
      model: reply.model?.name ?? "",
      modelHash: reply.model?.modelHash ?? "",
      tokenizerHash: reply.model?.tokenizerHash ?? "",
      maxModelLen: reply.model?.maxModelLen ?? 0,
      vocabSize: reply.model?.vocabSize ?? 0,
      eosTokenIds: reply.model?.eosTokenIds ?? [],
      numerics: reply.numerics ?? "",
      hasChatTemplate: reply.hasChatTemplate ?? false,
    };
  }

  /** Ends what is under way and closes the connection. */
  close(): void {
    this.closed = true;
    for (const call of this.live) call.cancel();
    this.stub.close();
  }

  private stream(message: GenerateMessage, options: GenerateOptions): Stream {
    this.checkOpen();
    const who = this.identity(options);
    const metadata = this.metadata(who.requestId, who.tenant);
    const generation = {
      ...who,
      message,
      n: request.answers(options),
      resumes: this.options.resume !== false,
      ...(options.signal === undefined ? {} : { signal: options.signal }),
    };
    const stream = new Stream(generation, this.retry, (try_, deadline) => {
      const call = this.stub.Generate(try_, metadata, { deadline });
      const entry = { cancel: () => stream.cancel() };
      this.live.add(entry);
      call.on("close", () => this.live.delete(entry));
      return call;
    });
    return stream;
  }

  /** Sends until there is a reply, or a failure that stands. */
  private async unary<Q, R>(name: string, method: Unary<Q, R>, message: Q, options: CallOptions): Promise<R> {
    request.checkNames(name, options, request.NAMES.call);
    const who = this.identity(options);
    const metadata = this.metadata(who.requestId, who.tenant);
    const retries = new Retries(this.retry, Date.now() + who.timeoutMs);
    for (;;) {
      this.checkOpen();
      try {
        return await this.once(method, message, metadata, retries.deadline, options.signal);
      } catch (raw) {
        const error = fromServiceError(raw as ServiceError);
        const attempt = retries.attempt;
        const delay = options.signal?.aborted ? undefined : retries.after(error, Date.now(), Math.random());
        if (delay === undefined) throw error.withFacts(who.requestId, attempt);
        await sleep(delay, undefined, options.signal === undefined ? {} : { signal: options.signal }).catch(() => {
          throw new RequestCancelledError("CANCELLED", "the request was cancelled").withFacts(who.requestId, attempt);
        });
      }
    }
  }

  private once<Q, R>(method: Unary<Q, R>, message: Q, metadata: Metadata, deadline: number, signal?: AbortSignal): Promise<R> {
    return new Promise<R>((resolve, reject) => {
      const onAbort = (): void => call.cancel();
      const call = method(message, metadata, { deadline }, (error, reply) => {
        signal?.removeEventListener("abort", onAbort);
        this.live.delete(call);
        if (error === null && reply !== undefined) resolve(reply);
        else reject(error);
      });
      this.live.add(call);
      signal?.addEventListener("abort", onAbort, { once: true });
      if (signal?.aborted) onAbort();
    });
  }

  private identity(options: CallOptions): { requestId: string; tenant: string | undefined; timeoutMs: number } {
    const tenant = options.tenant ?? this.options.tenant;
    return {
      requestId: request.requestId("requestId", options.requestId ?? randomUUID().replaceAll("-", "")),
      tenant: tenant === undefined ? undefined : request.requestId("tenant", tenant),
      timeoutMs: request.timeout("timeoutMs", options.timeoutMs ?? this.options.timeoutMs ?? DEFAULT_TIMEOUT_MS),
    };
  }

  private metadata(requestId: string, tenant: string | undefined): Metadata {
    const metadata = new Metadata();
    for (const [name, value] of Object.entries(this.options.metadata?.() ?? {})) metadata.set(name, value);
    metadata.set("tercet-request-id", requestId);
    if (tenant !== undefined) metadata.set("tercet-tenant", tenant);
    if (this.options.apiKey !== undefined) metadata.set("authorization", `Bearer ${this.options.apiKey}`);
    return metadata;
  }

  private checkOpen(): void {
    if (this.closed) throw new FailedPreconditionError("FAILED_PRECONDITION", "the client is closed", { reason: "CLIENT_CLOSED" });
  }
}
