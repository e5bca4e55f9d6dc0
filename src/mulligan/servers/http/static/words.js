// Calls, outcomes and reasons in words.
import { counted } from "./dom.js";

export const STATUS = {
  committed: "done",
  aborted: "failed, rolled back",
  undone: "undone",
  open: "running",
  evicted: "done, bytes dropped",
  external: "external edit",
};

const VERBS = { undo: "Undo", redo: "Redo", restore: "Restore", rollback: "Roll back", rewind: "Rewind", merge: "Merge fork", fork: "Fork" };
const TOOLS = {
  write_file: "Write",
  edit_file: "Edit",
  apply_patch: "Patch",
  exec: "Run",
  shell: "Run",
  run: "Run",
  delete: "Delete",
  move: "Move",
  mkdir: "Make folder",
  Bash: "Run",
  Write: "Write",
  Edit: "Edit",
};

export const OUTCOMES = {
  restored: "will go back",
  merged: "will be merged with later edits",
  conflicted: "stays as it is: conflict",
  skipped: "stays as it is",
  failed: "cannot be changed",
};

export const REASONS = {
  same_lines: "the same lines were edited since",
  binary: "it is not text and was changed since",
  mode: "its permissions were changed since",
  type_changed: "it is another kind of thing now",
  deleted_externally: "it was deleted since",
  ambiguous: "it is not certain who changed it",
  file_in_use: "a program has it open",
  evicted: "its earlier bytes were dropped to stay under the cap",
  lost: "a power cut took its earlier bytes",
  not_captured: "its earlier bytes were never captured",
  io_error: "the disk refused",
  git: "git's own files stay as they are",
  git_changed: "HEAD, its branch or the index changed since",
};

export function statusOf(call) {
  return call.external ? "external" : call.status;
}

export function title(call) {
  if (call.external) return "Edited outside";
  if (call.verb) return VERBS[call.verb] || call.verb;
  const tool = TOOLS[call.tool] || call.tool || call.label || "Call";
  return call.command ? call.command : tool[0].toUpperCase() + tool.slice(1).replaceAll("_", " ");
}

export function isCommand(call) {
  return Boolean(call.command) && !call.verb;
}

// The first changed paths; a folder is left out if something in it is listed.
export function pathsText(call) {
  const names = call.changes.map((change) => change.path);
  const shown = names.filter((name) => !names.some((other) => other.startsWith(`${name}/`)));
  if (!shown.length) return "";
  const more = call.files - (names.length - shown.length) - Math.min(2, shown.length);
  return shown.slice(0, 2).join(", ") + (more > 0 ? ` and ${more.toLocaleString("en")} more` : "");
}

// A call in a few words, for sentences and lists.
export function named(call) {
  const path = isCommand(call) ? "" : pathsText(call);
  return path ? `${title(call)} ${path}` : title(call);
}

// The tool, if the title does not say it, and why the call failed.
export function detailsOf(call) {
  return [isCommand(call) ? [TOOLS[call.tool] || call.tool, pathsText(call)] : null, call.reason ? reasonText(call.reason) : call.files ? null : "no files changed"].flat().filter(Boolean);
}

export function reasonText(reason) {
  return REASONS[reason] || String(reason).replaceAll("_", " ");
}

export const ROLES = { user: "User", assistant: "Agent", system: "System", tool: "Tool" };

export function said(call) {
  return `${named(call)}, ${STATUS[statusOf(call)]}, ${counted(call.files, "file")}`;
}
