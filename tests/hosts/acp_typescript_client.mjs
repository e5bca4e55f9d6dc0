// The protocol's own TypeScript SDK as a client: works on one prompt, then goes all our ways back and forth again.
//
//   ACP_SDK=…/acp.js node typescript_client.mjs FOLDER PREFIX COMMAND…
//
// Prints one JSON object: what the agent said of itself, what each request came to, the updates that the SDK took for
// valid and gave to us, those that came, and the files after each step.

import { spawn } from "node:child_process";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { Readable, Writable } from "node:stream";

const { client, methods, ndJsonStream, PROTOCOL_VERSION } = await import(process.env.ACP_SDK);
const [folder, prefix, command, ...words] = process.argv.slice(2);

const agent = spawn(command, words, { stdio: ["pipe", "pipe", "inherit"] });
const seen = { lines: "" };
agent.stdout.on("data", (chunk) => (seen.lines += chunk));

const told = { taken: [], steps: [] };
let restored;
const restoring = new Promise((done) => (restored = done));
const app = client({ name: "typescript-client" })
  .onNotification(methods.client.session.update, ({ params: { update } }) => {
    told.taken.push(update);
    if (update._meta && update.toolCallId) restored();
  })
  .onRequest(methods.client.session.requestPermission, () => ({ outcome: { outcome: "cancelled" } }));

function files() {
  return Object.fromEntries(readdirSync(folder).sort().map((name) => [name, readFileSync(join(folder, name), "utf8")]));
}

async function step(ctx, method, params) {
  const result = await ctx.request(method, params).catch((error) => ({ error: { code: error.code, data: error.data } }));
  told.steps.push({ method, result, files: files() });
  return result;
}

await app.connectWith(ndJsonStream(Writable.toWeb(agent.stdin), Readable.toWeb(agent.stdout)), async (ctx) => {
  told.initialize = await ctx.request(methods.agent.initialize, { protocolVersion: PROTOCOL_VERSION, clientCapabilities: {} });
  const { sessionId } = await ctx.request(methods.agent.session.new, { cwd: folder, mcpServers: [] });
  const prompt = [{ type: "text", text: "do it" }];
  await step(ctx, methods.agent.session.prompt, { sessionId, prompt });
  await step(ctx, `${prefix}session/rollback`, { sessionId });
  await step(ctx, `${prefix}session/redo`, { sessionId });
  await step(ctx, `${prefix}session/restore_tool_call`, { sessionId, toolCallId: "tc_1" });
  await restoring; // its update follows the answer
  await step(ctx, `${prefix}session/nonsense`, { sessionId });
  await step(ctx, methods.agent.session.close, { sessionId });
});
agent.stdin.end();
await new Promise((done) => agent.once("close", done));
const came = seen.lines.split("\n").filter(Boolean).map((line) => JSON.parse(line));
told.came = came.filter((frame) => frame.method === "session/update").map((frame) => frame.params.update);
console.log(JSON.stringify(told));
