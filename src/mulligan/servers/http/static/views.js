// The other pages: files at a point, blame, comparing, forks, a live session, search, storage, and the first look.
import { age, ago, button, bytes, counted, failure, fill, h, icon, rootName, sessionName, spinner } from "./dom.js";
import { enc, get, link, post } from "./api.js";
import { fileDiff, sourceText } from "./diff.js";
import { ROLES, named } from "./words.js";

function crumbs(path, href, name) {
  const parts = path === "." ? [] : path.split("/");
  const items = [h("a", { href: href(".") }, name)];
  parts.forEach((part, n) => items.push(" / ", n + 1 === parts.length ? h("span", part) : h("a", { href: href(parts.slice(0, n + 1).join("/")) }, part)));
  return h("nav.crumbs", { "aria-label": "Folder" }, items);
}

function query(values) {
  const found = Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return found.map(([name, value]) => `${name}=${enc(value)}`).join("&");
}

// Files: folders, a file, its blame; now, or before or after a call.
export async function filesView(app, place, asked) {
  const at = asked.at || null, side = asked.side || "before";
  const call = at ? await get(`/calls/${enc(at)}`) : null;
  const root = asked.root || call?.root_id || app.root;
  const href = (path, more = {}) => `#/files?${query({ root, at, side: at ? side : null, path, ...more })}`;
  const path = asked.path || ".";
  const body = h("div", spinner());
  const head = h("header.page-head", h("h2", "Files"), crumbs(path, href, rootName(app.roots.find((one) => one.id === root) || { name: "all files" })));
  fill(place, head, body);
  if (call) head.append(pointBar(app, call, { root, side, path }));
  const file = await get("/file", { root, path, at, side, limit: 1000 });
  if (file.state === "dir" || path === ".") {
    const list = h("ul.tree"), rest = h("div.actions");
    const more = async (after) => {
      const tree = await get("/tree", { root, path, at, side, after });
      list.append(...tree.entries.map((entry) => h("li", h("a", { href: href(entry.path) }, icon(entry.kind === "dir" ? "folder" : "file"), h("span", entry.name)), h("span.dim", entry.kind === "file" ? bytes(entry.size) : entry.kind === "symlink" ? "link" : ""))));
      fill(rest, tree.next ? button(`Show more of ${tree.total.toLocaleString("en")} names`, () => more(tree.next)) : tree.total ? null : h("p.note", "This folder is empty."));
    };
    fill(body, list, rest);
    await more(null);
    if (call?.session_id) body.append(await transcriptOf(call));
    return;
  }
  const raw = h("a.button", { href: link("/file/bytes", { root, path, at, side: at ? side : null }), download: "" }, "Save");
  if (file.state !== "text") {
    const words = { absent: "There is no such file at this point.", binary: "This file is not text.", large: "This file is too large to show here.", evicted: "The stored bytes were dropped to stay under the cap." };
    fill(body, h("p.note", words[file.state] || file.state, file.entry.size === null ? "" : ` ${bytes(file.entry.size)}.`), file.state === "absent" || file.state === "evicted" ? null : raw);
    return;
  }
  const blaming = asked.blame && !at;
  const bar = h("div.file-bar", h("h3", counted(file.total, "line")), h("span.actions", at ? null : h("a.button", { href: href(path, { blame: blaming ? null : 1 }) }, blaming ? "Hide who wrote it" : "Who wrote each line?"), raw));
  const list = h("div.source", { tabindex: "0", role: "region", "aria-label": path });
  fill(body, bar, list);
  let done = 0;
  const more = async () => {
    const page = blaming ? await get("/blame", { root, path, line: done + 1, limit: 1000 }) : done ? await get("/file", { root, path, at, side, line: done + 1, limit: 1000 }) : file;
    list.querySelector("button.more")?.remove();
    list.append(sourceText(page.lines, done + 1, blaming ? (line, n) => origin(line, page.lines[n - 1]) : null));
    done += page.lines.length;
    if (done < page.total) list.append(button("Show more lines", more, { kind: "more" }));
  };
  await more();
}

// Which point a page of files shows, and how to go back to it.
function pointBar(app, call, { root, side, path }) {
  const at = call.id, other = side === "before" ? "after" : "before";
  const isChanged = call.changes.some((change) => change.path === path);
  const may = app.me.role === "controller";
  const restore = () => app.restore(call, isChanged ? { paths: [path] } : undefined);
  return h(
    "div.point",
    h("p", `As it was ${side} `, h("a", { href: `#/call/${enc(at)}` }, named(call)), ", ", age(call.started_at)),
    h("div.links", h("a", { href: `#/files?${query({ root, at, side: other, path })}` }, `See it ${other}`), h("a", { href: `#/files?${query({ root, path })}` }, "See it now")),
    may && call.session_id ? h("div.actions", button("Rewind to here …", () => app.rewind(call, side), { kind: "small" }), side === "before" && call.files ? button(isChanged ? "Restore this file …" : "Restore its files …", restore, { kind: "small", title: "Put back only what this call changed" }) : null) : null,
  );
}

function origin(line, before) {
  if (before && before.call_id === line.call_id && before.origin === line.origin) return h("span.same-origin", "");
  if (line.origin === "before") return h("span.dim", "before the record");
  if (!line.call_id) return h("span.dim", "edited outside, just now");
  const words = line.prompt ? `“${line.prompt}”` : line.external ? "edited outside" : line.tool || "call";
  return h("a.origin", { href: `#/call/${enc(line.call_id)}`, title: words }, h("span.words", words), age(line.at));
}

async function transcriptOf(call) {
  const found = await get(`/sessions/${enc(call.session_id)}/transcript`, { at: call.id, limit: 100 });
  return h("section.then", h("h3", "The transcript up to here"), messages(found.messages));
}

function messages(list) {
  if (!list.length) return h("p.note", "Nothing was said.");
  return h("ol.messages", list.map((one) => h(`li.${["user", "assistant"].includes(one.role) ? one.role : "other"}`, h("header", h("span.role", ROLES[one.role] || one.role), age(one.at)), h("div.said", one.text))));
}

// Comparing two points, or two forks.
export async function compareView(app, place, asked) {
  const root = asked.root || app.root;
  let sides = asked.sides === "1";
  if (asked.other && !app.roots.some((one) => one.id === asked.other)) await app.loadRoots();
  const body = h("div.diffs", spinner());
  const calls = (await get("/calls", { root, limit: 200 })).calls.filter((call) => call.files);
  // The lists have the newest calls; the address may name older ones.
  const missing = [asked.from, asked.to].filter((id) => id && id !== "now" && !calls.some((call) => call.id === id));
  if (missing.length) calls.push(...(await get("/calls", { ids: missing.join(",") })).calls);
  const option = (side) => (call) => h("option", { value: call.id }, `${side} ${named(call).slice(0, 70)} · ${ago(call.started_at)}`);
  const from = h("select", { "aria-label": "From" }, calls.map(option("before")));
  const to = h("select", { "aria-label": "To" }, h("option", { value: "now" }, "now"), calls.map(option("after")));
  const forks = app.roots.filter((one) => one.id !== root);
  const other = h("select", { "aria-label": "Other folder" }, h("option", { value: "" }, "points of this folder"), forks.map((one) => h("option", { value: one.id }, `with ${rootName(one)}`)));
  if (asked.from) from.value = asked.from;
  if (asked.to) to.value = asked.to;
  if (asked.other) other.value = asked.other;
  if (!from.value && calls.length) from.value = calls[calls.length - 1].id;
  const draw = async () => {
    fill(body, spinner("Comparing …"));
    try {
      const asking = other.value ? { root, other: other.value } : { root, from: from.value, to: to.value };
      from.disabled = to.disabled = Boolean(other.value);
      history.replaceState(null, "", `#/compare?${query({ ...asking, sides: sides ? "1" : null })}`);
      const list = h("div"), rest = h("div.actions");
      const more = async (after) => {
        const found = await get("/compare", { ...asking, after });
        const shown = found.files.filter((file) => file.state !== "dir");
        list.append(...shown.map((file) => fileDiff(file, { sides })));
        fill(rest, found.next ? button(`Show more of ${counted(found.total, "path")}`, () => more(found.next)) : list.children.length ? null : h("p.note", "No file differs."));
      };
      await more(null);
      fill(body, list, rest);
    } catch (error) {
      fill(body, failure(error));
    }
  };
  for (const select of [from, to, other]) select.addEventListener("change", draw);
  const toggle = button(sides ? "Unified" : "Side by side", () => { sides = !sides; fill(toggle, sides ? "Unified" : "Side by side"); draw(); }, { kind: "quiet" });
  const swap = h("div.controls", h("label", "From ", from), h("label", "to ", to), forks.length ? h("label", "or compare ", other) : null, toggle);
  fill(place, h("header.page-head", h("h2", "Compare"), swap), body);
  if (!calls.length && !other.value) fill(body, h("p.note", "There is nothing to compare yet."));
  else await draw();
}

// Sessions as an indented tree.
export async function forksView(app, place) {
  const list = h("div", spinner());
  fill(place, h("header.page-head", h("h2", "Sessions and forks"), h("p.dim", "A fork goes on from a point. With files of its own it can be merged or dropped.")), list);
  await app.loadRoots();
  const sessions = [...(await app.loadSessions()).values()];
  const children = new Map();
  for (const one of sessions) {
    const parent = app.sessions.has(one.parent_id) ? one.parent_id : null;
    children.set(parent, [...(children.get(parent) || []), one]);
  }
  const branch = (one) => {
    const below = children.get(one.id) || [];
    const state = { open: "own files", merged: "merged", dropped: "dropped" }[one.files];
    const may = app.me.role === "controller";
    return h(
      "li",
      h(
        "div.session",
        h("a.name", { href: `#/session/${enc(one.id)}` }, sessionName(one)),
        h("span.facts", state ? h("span.badge", state) : null, one.closed_at ? h("span.badge", "closed") : null, age(one.last_at), one.messages ? h("span.dim", counted(one.messages, "message")) : null),
        h("span.actions", may ? button("Fork …", () => app.forkSession(one), { kind: "small", "aria-label": `Fork … ${sessionName(one)}` }) : null, may && one.files === "open" ? [button("Merge …", () => app.merge(one), { kind: "small", "aria-label": `Merge … ${sessionName(one)}` }), button("Drop …", () => app.drop(one), { kind: "small", "aria-label": `Drop … ${sessionName(one)}` })] : null, one.files === "open" ? h("a.button.small", { href: `#/compare?root=${enc(sourceRoot(app, one))}&other=${enc(one.root_id)}` }, "Compare") : null, one.files === "open" ? button("Copy path", () => navigator.clipboard.writeText(one.directory), { kind: "small", title: one.directory, "aria-label": `Copy path: ${sessionName(one)}` }) : null),
      ),
      below.length ? h("ul", below.map(branch)) : null,
    );
  };
  fill(list, sessions.length ? h("ul.sessions", (children.get(null) || []).map(branch)) : h("p.note", "There are no sessions yet."));
}

function sourceRoot(app, session) {
  return app.roots.find((root) => root.id === session.root_id)?.fork_of || app.root;
}

// A live session: clients, takeover, prompts, permission requests, transcript.
export async function sessionView(app, place, id) {
  const client = app.clientId;
  const draw = async () => {
    const [session, live, talk] = await Promise.all([get(`/sessions/${enc(id)}`), get(`/sessions/${enc(id)}/clients`).catch(() => ({ clients: [], permissions: [] })), get(`/sessions/${enc(id)}/transcript`, { limit: 100 })]);
    const me = live.clients.find((one) => one.client_id === client);
    const controls = me?.mode === "controller";
    const may = app.me.role === "controller" && !session.closed_at;
    const attach = (mode, takeover) => async () => { await app.guard(() => post(`/sessions/${enc(id)}/attach`, {}, { client_id: client, mode, takeover })); await draw(); };
    const text = h("textarea", { rows: "3", "aria-label": "Prompt", placeholder: "Ask the agent …" });
    const kept = place.querySelector("textarea")?.value;
    if (kept) text.value = kept;
    const send = async () => { if (!text.value.trim()) return; await app.guard(() => post(`/sessions/${enc(id)}/prompt`, {}, { client_id: client, text: text.value })); text.value = ""; place.querySelector("textarea").value = ""; await draw(); };
    const requests = live.permissions.map((one) => h("article.permission", h("h4", one.title || "The agent asks for permission"), one.detail ? h("pre", one.detail) : null, h("div.actions", (one.options || []).map((option) => button(option.name || option.optionId, async () => { await app.guard(() => post(`/sessions/${enc(id)}/permissions`, {}, { client_id: client, request: one.request_id, option: option.optionId })); await draw(); }, { disabled: !controls, kind: String(option.kind || "").startsWith("allow") ? "primary" : "" }))), controls ? null : h("p.note", "Take over to answer.")));
    fill(
      place,
      h("header.page-head", button("Back", () => app.back(), { kind: "back" }), h("h2", sessionName(session)), h("p.facts", session.closed_at ? h("span.badge", "closed") : h("span.badge.committed", "open"), age(session.last_at), h("a", { href: `#/?session=${enc(id)}` }, "Only its calls")), h("div.actions", may ? button("Roll back the last turn …", () => app.operate({ title: "Roll back the last turn", verb: "Roll back", path: `/sessions/${enc(id)}/rollback` }), {}) : null, may && session.redo ? button("Redo …", () => app.redo(id)) : null)),
      requests.length ? h("section", { "aria-live": "polite" }, h("h3", "Waiting for an answer"), requests) : null,
      h("section", h("h3", "Clients"), live.clients.length ? h("ul.clients", live.clients.map((one) => h("li", h("span.name", one.client_id === client ? "this page" : one.metadata?.name || one.client_id), h(`span.badge${one.mode === "controller" ? ".committed" : ""}`, one.mode), one.stale ? h("span.dim", "silent for a minute") : null))) : h("p.note", "Nobody is attached."), may ? h("div.actions", me ? null : button("Watch", attach("observer", false)), controls ? null : button("Take over", attach("controller", true), { kind: "primary" }), me ? button("Leave", async () => { await app.guard(() => post(`/sessions/${enc(id)}/detach`, {}, { client_id: client })); await draw(); }) : null) : null),
      controls ? h("section", h("h3", "Prompt"), text, h("div.actions", button("Send", send, { kind: "primary" }))) : null,
      h("section", h("h3", "Transcript"), messages(talk.messages)),
    );
  };
  fill(place, spinner());
  await draw();
  return draw;
}

// Search over prompts, transcript, paths, commands and tools.
export async function searchView(app, place, asked) {
  const body = h("div", spinner("Searching …"));
  fill(place, h("header.page-head", h("h2", `Search: ${asked.q || ""}`)), body);
  if (!asked.q) return fill(body, h("p.note", "Type words to search for."));
  const list = h("ul.results"), rest = h("div.actions");
  const more = async (before) => {
    fill(rest, spinner("Searching …"));
    const found = await get("/search", { q: asked.q, limit: 100, before });
    list.append(...found.results.map((one) => h("li", h("a", { href: one.call_id ? `#/call/${enc(one.call_id)}` : `#/session/${enc(one.session_id)}` }, h("span.where", one.where), h("span.text", one.text)), one.at ? age(one.at) : null)));
    fill(rest, found.next ? button("Search older calls", () => more(found.next)) : list.children.length ? null : h("p.note", "Nothing was found."));
  };
  fill(body, list, rest);
  await more(null);
}

// Storage: size, caps, what eviction would drop, and collecting garbage.
export async function storageView(app, place) {
  const may = app.me.role === "controller";
  const size = h("section.card"), collected = h("div", { role: "status" }), preview = h("div"), sessions = h("tbody"), moreSessions = h("div");
  const cap = h("input", { type: "number", min: "1", step: "0.1", "aria-label": "Cap in GiB" });
  const wanted = () => Math.round(Number(cap.value) * 2 ** 30);

  const list = (page) => {
    sessions.append(...page.sessions.map((one) => h("tr", h("td", h("a", { href: `#/session/${enc(one.session_id)}` }, sessionName(app.sessions.get(one.session_id) || { id: one.session_id, created_at: new Date().toISOString() }))), h("td", one.calls.toLocaleString("en")), h("td", bytes(one.bytes)), h("td", bytes(one.cap)))));
    fill(moreSessions, page.next ? button("Show more sessions", async () => list(await get("/storage", { before: page.next })), { kind: "more-files" }) : null);
  };
  // Only these parts change while a collection runs: what a person types in the cap stays, and so do the sessions.
  const show = (found) => {
    const share = Math.min(100, (100 * found.size) / found.cap);
    const meter = h("progress", { max: "100", value: share.toFixed(1), "aria-label": "How full the store is" });
    const next = found.would_evict.length ? `${evictedCalls(found)} would be dropped next.` : "Nothing has to be dropped.";
    fill(size, h("p.big", bytes(found.size), h("span.dim", ` of ${bytes(found.cap)}`)), meter, h("p.note", next));
    fill(collected, collection(found.gc));
    if (found.gc.state === "running") setTimeout(async () => place.contains(collected) && show(await get("/storage")), 300);
  };
  const look = async () => {
    const told = await get("/storage", { cap: wanted() });
    if (!told.would_evict.length) return fill(preview, h("p.note", "This cap would drop nothing."));
    const ids = told.would_evict.slice(0, EVICTED_NAMED).map((one) => one.call_id);
    const calls = new Map((await get("/calls", { ids: ids.join(",") })).calls.map((call) => [call.id, call]));
    const name = (one) => h("a", { href: `#/call/${enc(one.call_id)}` }, calls.has(one.call_id) ? named(calls.get(one.call_id)) : "a call");
    const rest = told.would_evict.length - ids.length;
    fill(
      preview,
      h("p.note", `This cap would drop the bytes of ${evictedCalls(told)}; they could not be undone any more.`),
      h("ul.evicted", told.would_evict.slice(0, EVICTED_NAMED).map((one) => h("li", name(one), age(one.at), h("span.dim", bytes(one.bytes))))),
      rest ? h("p.note", `and ${counted(rest, "more call")}${told.would_evict_more ? " or more" : ""}`) : null,
    );
  };
  const load = async () => {
    const found = await get("/storage");
    show(found);
    fill(sessions);
    list(found);
    return found;
  };
  const act = (path, body) => app.guard(async () => { await post(path, {}, body); await load(); });

  fill(place, spinner());
  cap.value = ((await load()).cap / 2 ** 30).toFixed(1);
  fill(
    place,
    h("header.page-head", h("h2", "Storage")),
    size,
    may ? h("section.card", h("h3", "Cap"), h("div.actions", h("label", cap, " GiB"), button("What would that drop?", look), button("Set the cap", () => act("/storage", { cap: wanted() }), { kind: "primary" })), preview) : null,
    may ? h("section.card", h("h3", "Collect garbage"), h("p.dim", "Deletes stored bytes that nothing needs."), h("div.actions", button("Collect now", () => act("/storage/gc"))), collected) : null,
    h("section", h("h3", "By session"), h("table.plain", h("thead", h("tr", h("th", "Session"), h("th", "Calls"), h("th", "Bytes"), h("th", "Cap"))), sessions), moreSessions),
  );
}

const EVICTED_NAMED = 20;

function evictedCalls(found) {
  return `${found.would_evict_more ? "more than " : ""}${counted(found.would_evict.length, "call")}`;
}

const STAGES = { "blobs checked": "Looking for what nothing needs", "blobs deleted": "Deleting" };

function collection(gc) {
  if (gc.state === "idle") return null;
  if (gc.state === "done") return h("p.note", gc.blobs ? `Deleted ${counted(gc.blobs, "stored content")}, ${bytes(gc.bytes)}.` : "Everything that is stored is needed.");
  if (gc.state === "failed") return h("p.note", gc.message || "It failed.");
  const share = gc.total ? Math.floor((100 * gc.done) / gc.total) : 0;
  return [h("progress", { max: "100", value: String(share), "aria-label": "Collecting garbage" }), h("p.note", `${STAGES[gc.stage]}: ${share} %`)];
}

const STARTS = [
  ["Claude Code", "in a terminal, once", "mulligan install claude"],
  ["Codex", "in a terminal, once", "mulligan install codex"],
  ["Gemini CLI", "in a terminal, once", "mulligan install gemini"],
  ["opencode", "in a terminal, once", "mulligan install opencode"],
  ["Zed", "in a terminal, once", "mulligan install zed"],
  ["Python", "in your program, after import mulligan", 'with mulligan.open(".") as m, m.session("work").call() as call: call.write_file("a.txt", "hello")'],
];

// The empty page: one line for each agent, and a demo that works.
export function firstLook(app, place) {
  const cards = STARTS.map(([name, where, line]) => {
    const copy = button("Copy", async () => {
      await navigator.clipboard.writeText(line).catch(() => getSelection().selectAllChildren(copy.previousSibling));
      fill(copy, "Copied");
      setTimeout(() => fill(copy, "Copy"), 1500);
    }, { kind: "small", "aria-label": `Copy the line for ${name}` });
    return h("li", h("h3", name), h("span.dim", where), h("div.copy", h("code", { tabindex: "0" }, line), copy));
  });
  const demo = button("Try the demo", async () => {
    fill(demo, "Making it …");
    const made = await app.guard(() => post("/demo"));
    if (made) await app.start(made.root_id);
  }, { kind: "primary" });
  fill(place, h("section.first", h("h2", "Nothing has happened yet"), h("p", "Mulligan records what agents do to your files, call by call, and undoes exactly the part that you choose. Connect one:"), h("ul.starts", cards), h("p", "Or look at a small project first:"), app.me.role === "controller" ? demo : null));
}
