/** The contract, read from the .proto files beside the code, with the types generated from them. */
import { loadPackageDefinition } from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import { fileURLToPath } from "node:url";

import type { ProtoGrpcType } from "./generated/tokenizer.js";
import type { TokenizerServiceClient } from "./generated/tercet/v1/TokenizerService.js";
import type { TokenizerServiceGenerateRequest } from "./generated/tercet/v1/TokenizerServiceGenerateRequest.js";
import type { TokenizerServiceGenerateResponse__Output } from "./generated/tercet/v1/TokenizerServiceGenerateResponse.js";

export type Stub = TokenizerServiceClient;
export type GenerateMessage = TokenizerServiceGenerateRequest;
export type GenerateEvent = TokenizerServiceGenerateResponse__Output;

const PROTOS = fileURLToPath(new URL("../protos", import.meta.url));

/** The options are those that the types were generated with (`npm run types`). */
const definition = loadSync("tercet/v1/tokenizer.proto", {
  includeDirs: [PROTOS],
  longs: String,
  enums: String,
  bytes: Buffer,
  oneofs: true,
});

export const { TokenizerService } = (loadPackageDefinition(definition) as unknown as ProtoGrpcType).tercet.v1;
