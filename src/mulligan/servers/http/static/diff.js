// Diffs and source text: lines with numbers, token classes and changed words, unified or side by side.
import { add, button, bytes, fill, h } from "./dom.js";
import { link } from "./api.js";

const WORDS = {
  binary: "Not text; it differs.",
  large: "Too large to show here.",
  evicted: "The stored bytes were dropped to stay under the cap.",
  same: "The text is the same; only the mode or the name differs.",
};
const KINDS = { created: "new", deleted: "deleted", renamed: "renamed", mode: "mode", modified: "" };

// The text of a line as text nodes in spans: `spans` are token classes, `words` are changed parts.
export function lineText(given, spans = [], words = []) {
  const code = h("code");
  // The server counts characters, and a string of ours counts halves of some of them.
  const text = /[\ud800-\udfff]/.test(given) ? Array.from(given) : given;
  const cuts = new Set([0, text.length]);
  for (const [start, end] of spans) cuts.add(start).add(end);
  for (const [start, end] of words) cuts.add(start).add(end);
  const places = [...cuts].filter((at) => at <= text.length).sort((a, b) => a - b);
  for (let n = 0; n + 1 < places.length; n++) {
    const [from, to] = [places[n], places[n + 1]];
    const classes = [];
    const span = spans.find(([start, end]) => start <= from && to <= end);
    if (span) classes.push(`t-${span[2].replace(/[^a-z0-9]/gi, "")}`);
    if (words.some(([start, end]) => start <= from && to <= end)) classes.push("word");
    const part = typeof text === "string" ? text.slice(from, to) : text.slice(from, to).join("");
    add(code, [classes.length ? h(`span.${classes.join(".")}`, part) : part]);
  }
  return code;
}

function unified(hunk) {
  const rows = hunk.lines.map((line) => {
    const kind = { "+": "added", "-": "removed", " ": "same" }[line.kind];
    return h(
      `tr.${kind}`,
      h("td.number", line.old === null ? "" : String(line.old)),
      h("td.number", line.new === null ? "" : String(line.new)),
      h("td.mark", { "aria-label": { added: "added", removed: "removed", same: "" }[kind] || null }, line.kind.trim()),
      h("td.text", lineText(line.text, line.spans, line.words), line.no_newline ? h("span.note", " (no newline at the end)") : null),
    );
  });
  return h("table.lines", h("tbody", rows));
}

function sideBySide(hunk) {
  const rows = [];
  for (let at = 0; at < hunk.lines.length; ) {
    if (hunk.lines[at].kind === " ") {
      rows.push([hunk.lines[at], hunk.lines[at]]);
      at += 1;
      continue;
    }
    const removed = [], addedLines = [];
    while (at < hunk.lines.length && hunk.lines[at].kind === "-") removed.push(hunk.lines[at++]);
    while (at < hunk.lines.length && hunk.lines[at].kind === "+") addedLines.push(hunk.lines[at++]);
    for (let n = 0; n < Math.max(removed.length, addedLines.length); n++) rows.push([removed[n], addedLines[n]]);
  }
  const cell = (line, side) =>
    line
      ? [
          h(`td.number.${line.kind === " " ? "same" : side}`, String((side === "removed" ? line.old : line.new) ?? "")),
          h(`td.text.${line.kind === " " ? "same" : side}`, lineText(line.text, line.spans, line.kind === " " ? [] : line.words)),
        ]
      : [h("td.number.empty"), h("td.text.empty")];
  return h("table.lines.sides", h("tbody", rows.map(([left, right]) => h("tr", cell(left, "removed"), cell(right, "added")))));
}

export function counts(file) {
  if (file.added === null || file.added === undefined) return null;
  return h("span.counts", h("span.plus", `+${file.added}`), " ", h("span.minus", `−${file.removed}`));
}

// One file. `hunkAction(file, hunk)` gives the buttons of a hunk, `fileAction(file)` those of the file.
export function fileDiff(file, options = {}) {
  const body = h("div.hunks", { tabindex: "0", role: "region", "aria-label": `Changes of ${file.path}` });
  const name = h("h4", file.from ? [h("span.dim", `${file.from} → `), file.path] : file.path);
  const isFolder = file.state === "dir";
  const kind = isFolder ? `${KINDS[file.kind] || ""} folder`.trim() : KINDS[file.kind];
  const mode = file.before.mode && file.after.mode && file.before.mode !== file.after.mode ? `mode ${file.before.mode} → ${file.after.mode}` : null;
  const head = h("header.file", name, kind ? h("span.tag", kind) : null, mode ? h("span.tag", mode) : null, isFolder ? null : counts(file), h("span.actions", options.fileAction?.(file)));
  if (isFolder) return h("article.diff.folder", { data: { path: file.path } }, head);
  if (file.state !== "text") {
    body.removeAttribute("tabindex");
    const size = file.after.size ?? file.before.size;
    fill(body, h("p.note", WORDS[file.state] || file.state, size === null ? "" : ` ${bytes(size)}.`, options.downloads?.(file)));
  }
  for (const hunk of file.hunks) {
    const where = `Lines ${hunk.new_start}–${hunk.new_start + Math.max(0, hunk.new_lines - 1)}`;
    body.append(
      h("section.hunk", { "aria-label": where }, h("div.where", h("span", where), h("span.actions", options.hunkAction?.(file, hunk))), options.sides ? sideBySide(hunk) : unified(hunk)),
    );
  }
  if (file.truncated) body.append(h("p.note", "The rest of this file is not shown. ", options.more ? button("Show more", () => options.more(file)) : null));
  return h("article.diff", { data: { path: file.path } }, head, body);
}

export function downloads(call) {
  return (file) =>
    ["before", "after"].map((side) => {
      const entry = file[side];
      if (entry.kind !== "file") return null;
      return [" ", h("a", { href: link(`/calls/${call}/bytes`, { path: file.path, side }), download: "" }, `Save as it was ${side}`)];
    });
}

// Source text with numbers; `margin(line, number)` fills the column before them.
export function sourceText(lines, first, margin) {
  return h(
    "table.lines",
    h("tbody", lines.map((line, n) => h("tr.same", { id: `L${first + n}` }, margin ? h("td.margin", margin(line, n)) : null, h("td.number", String(first + n)), h("td.text", lineText(line.text, line.spans))))),
  );
}
