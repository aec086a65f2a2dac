// node examples/batch.mjs TARGET < prompts.jsonl: many generations at once over one connection.
// A line in, such as {"prompt": "Once", "options": {"maxTokens": 8}}, is a line out; the order is kept.
// It goes on where a server dies, for up to the time limit.
import { createInterface } from "node:readline";
import { Client } from "tercet";

const client = new Client(process.argv[2], { retry: { attempts: 1_000, initialBackoffMs: 20, maxBackoffMs: 100 } });
const asked = [];
for await (const line of createInterface({ input: process.stdin })) {
  const { prompt, options } = JSON.parse(line);
  const stream = client.generate(prompt, options);
  asked.push(stream.collect().then(([answer]) => ({ text: answer.text, tokenIds: answer.tokenIds, tries: stream.attempt })));
}
for (const answer of await Promise.all(asked)) console.log(JSON.stringify(answer));
client.close();
