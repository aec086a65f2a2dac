/** The Node SDK of Tercet, an LLM server that speaks gRPC. */
export { Client, type ClientOptions } from "./client.js";
export * from "./errors.js";
export { type RetryPolicy } from "./retry.js";
export { type Stream } from "./stream.js";
export type * from "./types.js";
