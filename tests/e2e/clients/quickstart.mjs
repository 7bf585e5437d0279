// The quickstart in the OpenAI Node SDK, and the rest of what the SDK can ask of files and batches.
//
// Runs in a directory that holds `requests.jsonl` and `slow.jsonl`; the SDK's directory is the first argument,
// base URL and key come from the environment. Prints what it saw as one JSON object, in the same words as the
// Python program beside it.

import fs from "node:fs";
import { createRequire } from "node:module";
import { setTimeout as sleep } from "node:timers/promises";

const require = createRequire(process.argv[2] + "/");
const OpenAI = require("openai").default;
const version = JSON.parse(fs.readFileSync(process.argv[2] + "/node_modules/openai/package.json")).version;

const endpoint = "/v1/chat/completions";
const terminal = new Set(["completed", "failed", "expired", "cancelled"]);
const deadlineMs = 120_000;

async function refused(call) {
  try {
    await call();
  } catch (error) {
    if (error instanceof OpenAI.APIError) return [error.constructor.name, error.status, error.code];
    throw error;
  }
  return [];
}

async function finish(client, batch) {
  const deadline = Date.now() + deadlineMs;
  while (!terminal.has(batch.status)) {
    if (Date.now() > deadline) throw new Error(JSON.stringify(batch));
    await sleep(100);
    batch = await client.batches.retrieve(batch.id);
  }
  return batch;
}

async function ids(list) {
  const found = [];
  for await (const each of list) found.push(each.id);
  return found;
}

function counts(batch) {
  const { total, completed, failed } = batch.request_counts;
  return [batch.status, total, completed, failed];
}

async function main() {
  const seen = { version };
  const client = new OpenAI({
    baseURL: process.env.OPENRELAY_BASE_URL,
    apiKey: process.env.OPENRELAY_API_KEY,
  });

  const input = await client.files.create({ file: fs.createReadStream("requests.jsonl"), purpose: "batch" });
  seen.file = [input.object, input.purpose, input.status];
  seen.filename_follows_id = input.filename === `${input.id}.jsonl`;
  seen.bytes = input.bytes === fs.statSync("requests.jsonl").size;

  const create = (file, more) =>
    client.batches.create({ input_file_id: file.id, endpoint, completion_window: "24h", ...more });

  let batch = await create(input, { metadata: { from: "the SDK" } });
  seen.created = counts(batch);
  seen.batch_input = batch.input_file_id === input.id;
  seen.metadata = batch.metadata;

  batch = await finish(client, batch);
  seen.ended = counts(batch);
  seen.output_file = batch.output_file_id === `file-${batch.id}-output`;
  seen.error_file = batch.error_file_id;
  seen.usage = [batch.usage.input_tokens, batch.usage.output_tokens, batch.usage.total_tokens];

  const content = await (await client.files.content(batch.output_file_id)).text();
  const lines = content.trimEnd().split("\n").map((line) => JSON.parse(line));
  seen.results = Object.fromEntries(
    lines.map((line) => [line.custom_id, line.response.body.choices[0].message.content]),
  );

  const again = await client.files.retrieve(input.id);
  seen.file_again = JSON.stringify(again) === JSON.stringify(input);
  seen.input_content =
    (await (await client.files.content(input.id)).text()) === fs.readFileSync("requests.jsonl", "utf8");
  seen.listed = (await ids(client.files.list({ purpose: "batch" }))).includes(input.id);
  seen.unknown_purpose = await ids(client.files.list({ purpose: "nonsense" }));

  const three = [];
  for (let n = 0; n < 3; n++) three.push((await create(input, { priority: "expedited" })).id);
  const paged = await ids(client.batches.list({ limit: 1 }));
  seen.paged = JSON.stringify(paged.slice(0, 4)) === JSON.stringify([...three.reverse(), batch.id]);
  seen.paged_once = paged.length === new Set(paged).size;
  const page = await client.batches.list({ limit: 2 });
  seen.page = [page.data.length, page.has_more];
  for (const id of three) await finish(client, await client.batches.retrieve(id));

  const slow = await client.files.create({ file: fs.createReadStream("slow.jsonl"), purpose: "batch" });
  const running = await create(slow);
  seen.in_use = await refused(() => client.files.delete(slow.id));
  let cancelled = await client.batches.cancel(running.id);
  seen.cancel = cancelled.status;
  cancelled = await finish(client, cancelled);
  const [status, total, completed, failed] = counts(cancelled);
  seen.cancelled = [status, total, completed + failed];
  seen.cancel_again = await refused(() => client.batches.cancel(running.id));

  const deleted = await client.files.delete(input.id);
  seen.deleted = [deleted.id === input.id, deleted.deleted];
  seen.gone = await refused(() => client.files.retrieve(input.id));
  seen.unknown_batch = await refused(() => client.batches.retrieve("batch_unknown"));
  const stranger = client.withOptions({ apiKey: "or_not_a_key_of_anybody" });
  seen.stranger = await refused(() => stranger.batches.list());
  return seen;
}

console.log(JSON.stringify(await main()));
