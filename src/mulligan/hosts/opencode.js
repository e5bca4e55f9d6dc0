// Mulligan's plugin for opencode. It reports prompts and tool calls to Mulligan's hook, answers /undo, /redo and
// /mulligan without a model call, and tells the model what was undone. If Mulligan fails, opencode goes on without it.
import { spawn } from "node:child_process"

const HOOK = "@HOOK@"
const COMMANDS = ["undo", "redo", "mulligan"]
// Tools that change nothing, and `task`: the calls of its subagent are reported one by one.
const UNREPORTED = new Set(["read", "grep", "glob", "list", "webfetch", "websearch", "todowrite", "todoread", "task",
  "skill", "question", "lsp", "plan_exit"])
const NAMES = { edit: "Edit", write: "Write", bash: "Bash", patch: "apply_patch" }

const report = (body) => new Promise((resolve) => {
  const child = spawn(HOOK[0], HOOK.slice(1), { stdio: ["pipe", "pipe", "ignore"] })
  let text = ""
  const end = () => { try { resolve(JSON.parse(text)) } catch { resolve(null) } }
  child.on("error", () => resolve(null))
  child.stdin.on("error", () => {})
  child.stdout.on("data", (data) => { text += data })
  child.on("close", end)
  child.stdin.end(JSON.stringify(body))
})

const inputOf = (args = {}) => ({ file_path: args.filePath, command: args.command ?? args.patchText })

export const Mulligan = async ({ client, directory }) => {
  const parents = new Map()
  const news = new Map()
  const answering = new Set()
  const reverts = new Map()
  const rootOf = (id) => (parents.has(id) ? rootOf(parents.get(id)) : id)
  const about = (id, event) => ({
    hook_event_name: event, session_id: rootOf(id), cwd: directory, ...(parents.has(id) ? { agent_id: id } : {}),
  })
  const tool = (event, input, args) => UNREPORTED.has(input.tool) ? null : report({
    ...about(input.sessionID, event), tool_use_id: input.callID, tool_name: NAMES[input.tool] ?? input.tool,
    tool_input: inputOf(args),
  })
  return {
    event: async ({ event }) => {
      const info = event.properties?.info
      if (event.type === "session.created" && info?.parentID) parents.set(info.id, info.parentID)
      if (event.type === "session.updated" && (info?.revert?.messageID ?? null) !== (reverts.get(info.id) ?? null)) {
        // opencode's own undo and redo have changed files.
        reverts.set(info.id, info.revert?.messageID ?? null)
        await report(about(info.id, "HostReverted"))
      }
      if (event.type === "session.idle" && !parents.has(event.properties.sessionID))
        await report(about(event.properties.sessionID, "Stop"))
    },
    "chat.message": async (input, output) => {
      if (answering.has(input.sessionID) || parents.has(input.sessionID)) return
      const prompt = output.parts.filter((part) => part.type === "text").map((part) => part.text).join("\n")
      const answer = await report({ ...about(input.sessionID, "UserPromptSubmit"), prompt, prompt_id: output.message.id })
      news.set(input.sessionID, answer?.hookSpecificOutput?.additionalContext)
    },
    // Each request of the turn has the news once: opencode writes the system message anew for each of them.
    "experimental.chat.system.transform": async (input, output) => {
      const text = news.get(input.sessionID)
      if (text) output.system.push(text)
    },
    "tool.execute.before": async (input, output) => { await tool("PreToolUse", input, output.args) },
    "tool.execute.after": async (input) => { await tool("PostToolUse", input, input.args) },
    "command.execute.before": async (input) => {
      if (!COMMANDS.includes(input.command)) return
      const prompt = `/${input.command} ${input.arguments ?? ""}`.trim()
      const answer = await report({ ...about(input.sessionID, "UserPromptSubmit"), prompt })
      const text = answer?.reason ?? "Mulligan did not answer."
      answering.add(input.sessionID)
      try {
        // The person sees an ignored part; the model never does, because it gets the news at the next prompt.
        const parts = [{ type: "text", text, ignored: true }]
        await client.session.prompt({ path: { id: input.sessionID }, body: { noReply: true, parts } })
      } finally {
        answering.delete(input.sessionID)
      }
      throw new Error("Mulligan has answered this command.")
    },
  }
}
