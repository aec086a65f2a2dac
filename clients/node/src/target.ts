/** Where a server is, and how a channel to it behaves. Pure. */
import type { ChannelOptions } from "@grpc/grpc-js";
import { isIP } from "node:net";

import { invalid } from "./errors.js";

const UNIX_PATH_BYTES = 107;
const MAX_MESSAGE_BYTES = 64 * 1024 * 1024;
const HOST_PORT = /^(\[[0-9A-Fa-f:.]+\]|[^:/[\]\s]+):(\d{1,5})$/;
const SCHEMES = ["dns:///", "dns:", "ipv4:", "ipv6:"];

/** Refuses, by name, what gRPC would take and never reach. Good: `host:port`, `[::1]:port`, `unix:/path`, `dns:///host:port`. */
export function checkTarget(target: string): void {
  if (typeof target !== "string") throw invalid("target", "must be a string");
  if (target.startsWith("unix:")) {
    const bytes = Buffer.byteLength(unixPath(target));
    if (bytes < 1 || bytes > UNIX_PATH_BYTES) {
      throw invalid("target", `is a Unix socket: its path has 1 to ${UNIX_PATH_BYTES} bytes, this has ${bytes}`, UNIX_PATH_BYTES);
    }
    return;
  }
  if (/^https?:\/\//.test(target)) {
    throw invalid("target", `must be host:port or unix:/path, not the URL '${target}'; for TLS set tls: true`);
  }
  for (const address of addresses(target)) {
    const port = Number(HOST_PORT.exec(address)?.[2] ?? 0);
    if (port < 1 || port > 65535) throw invalid("target", `must be host:port or unix:/path, not '${target}'`);
  }
}

/** Whether bytes to `target` stay on this machine. */
export function isLocal(target: string): boolean {
  if (target.startsWith("unix:")) return true;
  return addresses(target).every((address) => isLoopback(address.slice(0, address.lastIndexOf(":"))));
}

/** Keepalive finds a dead peer in 30 s; reconnecting is as quick as the retries; no proxy for this machine itself. */
export function channelOptions(target: string): ChannelOptions {
  return {
    "grpc.keepalive_time_ms": 20_000,
    "grpc.keepalive_timeout_ms": 10_000,
    "grpc.keepalive_permit_without_calls": 0,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 5_000,
    "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
    "grpc.primary_user_agent": "tercet-node",
    "grpc.service_config": JSON.stringify({ loadBalancingConfig: [{ round_robin: {} }] }),
    ...(isLocal(target) ? { "grpc.enable_http_proxy": 0 } : {}),
  };
}

function unixPath(target: string): string {
  return target.slice("unix:".length).replace(/^\/\/(?=\/)/, "");
}

function addresses(target: string): string[] {
  const scheme = SCHEMES.find((one) => target.startsWith(one)) ?? "";
  return target.slice(scheme.length).split(",");
}

function isLoopback(host: string): boolean {
  const bare = host.replace(/^\[|\]$/g, "");
  if (bare === "localhost" || bare === "::1") return true;
  return isIP(bare) === 4 && bare.startsWith("127.");
}
