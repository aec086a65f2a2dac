// The contract travels with the package: the client reads it at start.
import { cp, mkdir } from "node:fs/promises";

const here = new URL(".", import.meta.url);
await mkdir(new URL("dist/protos/tercet/v1/", here), { recursive: true });
for (const name of ["common.proto", "tokenizer.proto", "executor.proto"]) {
  await cp(new URL(`../../protos/tercet/v1/${name}`, here), new URL(`dist/protos/tercet/v1/${name}`, here));
}
