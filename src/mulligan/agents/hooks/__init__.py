"""Hooks for Claude Code, Gemini CLI and Codex: what their hooks report becomes calls that can be undone.

`mulligan.hosts.settings` installs the hooks. An agent then runs `client` around each tool call; it sends the event to
the process in `background`, and `recorder` records it. Read `recorder` first: `HookEvent` is what a hook reports,
`Recorder` what Mulligan records. `socket` has the address of the background process and the spool of events that did
not reach it.
"""
