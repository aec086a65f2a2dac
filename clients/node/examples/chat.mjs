// node examples/chat.mjs [TARGET] [QUESTION]: an answer as it comes. `npm run build` first.
import { Client } from "tercet";

const [target = "localhost:50051", question = "What is the capital of France?"] = process.argv.slice(2);
const client = new Client(target);
const stream = client.chat([{ role: "user", content: question }], { temperature: 0, maxTokens: 64 });
for await (const delta of stream) process.stdout.write(delta.text);
console.log(`\n[${stream.finishReason}, ${stream.answers[0].usage.deliveredTokens} tokens, request ${stream.requestId}]`);
client.close();
