// The page: header, timeline and detail; routes by the part of the address after #; live events; keys; operations.
import { button, counted, failure, fill, h, rootName, sessionName } from "./dom.js";
import { ApiError, Events, enc, get, post, whoAmI } from "./api.js";
import "./timeline.js";
import "./call.js";
import "./plan.js";
import { named, said } from "./words.js";
import { compareView, filesView, firstLook, forksView, searchView, sessionView, storageView } from "./views.js";

const KEYS = [
  ["j / k", "next and previous call"],
  ["Enter", "open the call"],
  ["u", "undo it"],
  ["r", "redo"],
  ["f", "fork here"],
  ["/", "search"],
  ["?", "this help"],
  ["Esc", "close"],
];
const GATHER_MS = 60;

class App extends HTMLElement {
  async connectedCallback() {
    this.sessions = new Map();
    this.roots = [];
    this.pending = new Set();
    this.unknown = new Set();
    this.elsewhere = new Set();
    this.clientId = sessionStorage.getItem("client") || `page-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`;
    sessionStorage.setItem("client", this.clientId);
    this.build();
    addEventListener("hashchange", () => this.route());
    addEventListener("keydown", (event) => this.key(event));
    document.addEventListener("connection", (event) => {
      // One request failed; as long as events come, the connection as a whole is not lost.
      if (event.detail === "lost" && this.events?.source?.readyState === EventSource.OPEN) return;
      this.connection(event.detail);
    });
    this.events = new Events((event) => this.happened(event), (state) => this.connection(state));
    try {
      this.me = await whoAmI();
      await this.start();
    } catch (error) {
      fill(this.main, failure(error));
    }
  }

  build() {
    this.rootSelect = h("select", { "aria-label": "Folder", onchange: () => this.start(this.rootSelect.value) });
    this.search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search", autocomplete: "off" });
    this.state = h("span.live", { role: "status" }, "connecting");
    this.nav = h("nav.tabs", { "aria-label": "Pages" }, [["#/", "Timeline"], ["#/files", "Files"], ["#/compare", "Compare"], ["#/forks", "Forks"], ["#/storage", "Storage"]].map(([href, words]) => h("a", { href }, words)));
    const form = h("form.search", { role: "search", onsubmit: (event) => { event.preventDefault(); location.hash = `#/search?q=${enc(this.search.value)}`; } }, this.search);
    this.timeline = document.createElement("m-timeline");
    this.timeline.sessionOf = (call) => this.sessionBeside(call);
    this.newer = button("", () => { this.timeline.scrollTop = 0; this.fresh = 0; this.newer.hidden = true; }, { kind: "newer" });
    this.newer.hidden = true;
    this.detail = h("main.detail", { tabindex: "-1", id: "detail" });
    this.main = this.detail;
    this.said = h("div.hidden", { "aria-live": "polite" });
    this.toasts = h("div.toasts", { role: "status" });
    this.plan = document.createElement("m-plan");
    this.help = h("dialog.help", { "aria-labelledby": "help-title" }, h("h2", { id: "help-title" }, "Keys"), h("dl", KEYS.map(([key, words]) => [h("dt", h("kbd", key)), h("dd", words)])), button("Close", () => this.help.close()));
    this.list = h("section.list", { "aria-label": "Timeline" }, this.newer, this.timeline);
    fill(
      this,
      h("a.skip", { href: "#detail", onclick: (event) => { event.preventDefault(); this.detail.focus(); } }, "Skip to the content"),
      h("header.top", h("h1.brand", h("a", { href: "#/" }, "Mulligan")), this.rootSelect, this.nav, form, this.state, button("?", () => this.help.showModal(), { kind: "quiet", "aria-label": "Keys" })),
      h("div.panes", this.list, this.detail),
      this.said, this.toasts, this.plan, this.help,
    );
  }

  // Load the roots, choose one, and follow what happens from here on.
  async start(wanted) {
    await this.loadRoots();
    const known = wanted || sessionStorage.getItem("root");
    const newest = await get("/calls", { limit: 1 });
    const busiest = this.roots.find((root) => root.id === newest.calls[0]?.root_id);
    this.root = this.roots.find((root) => root.id === known)?.id || busiest?.fork_of || busiest?.id || this.roots[0]?.id || null;
    if (this.root) sessionStorage.setItem("root", this.root);
    this.showRoots();
    this.elsewhere.clear();
    await this.loadSessions();
    const page = await this.loadTimeline(wanted ? {} : this.place().query);
    this.events.open(page.event);
    if (wanted && location.hash !== "#/") location.hash = "#/";
    else await this.route();
  }

  async loadRoots() {
    const roots = [];
    for (let before = {}; before; ) {
      const page = await get("/roots", before);
      roots.push(...page.roots);
      before = page.next ? { before: page.next } : null;
    }
    this.roots = roots;
  }

  showRoots() {
    fill(this.rootSelect, this.roots.map((root) => h("option", { value: root.id, selected: root.id === this.root, title: root.path }, rootName(root))));
    this.rootSelect.value = this.root || "";
    this.rootSelect.hidden = this.roots.length < 2;
  }

  // An agent began to work in a session that the page has not seen: here, or in a folder that may be new.
  async loadUnknown() {
    const asked = [...this.unknown];
    this.unknown.clear();
    const known = this.roots.map((root) => root.id).join();
    await Promise.all([this.loadSessions(), this.loadRoots()]);
    for (const id of asked) if (!this.sessions.has(id)) this.elsewhere.add(id);
    if (this.roots.map((root) => root.id).join() !== known) this.showRoots();
  }

  async loadSessions() {
    const found = await get("/sessions", { root: this.root, limit: 500 });
    this.sessions = new Map(found.sessions.map((one) => [one.id, one]));
    return this.sessions;
  }

  async loadTimeline(query = {}) {
    this.shownSession = query.session || null;
    const scope = query.session ? { session: query.session } : this.root ? { root: this.root } : {};
    const page = await this.timeline.load(scope);
    this.isEmpty = !page.calls.length;
    return page;
  }

  // The session of a group of calls, unless the list has only one, or the prompt beside it says the same.
  sessionBeside(call) {
    const session = this.sessions.get(call.session_id);
    if (this.shownSession || this.sessions.size < 2 || !session) return null;
    return session.title && call.prompt?.startsWith(session.title) ? null : sessionName(session);
  }

  place() {
    const [path, rest = ""] = location.hash.replace(/^#/, "").split("?");
    return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), query: Object.fromEntries(new URLSearchParams(rest)) };
  }

  async route() {
    const { parts, query } = this.place();
    const [page, id] = parts;
    this.classList.toggle("open", Boolean(page));
    this.classList.toggle("wide", ["files", "compare", "forks", "storage", "search"].includes(page));
    for (const tab of this.nav.children) {
      if (tab.getAttribute("href") === `#/${["call", "session"].includes(page) ? "" : page || ""}`) tab.setAttribute("aria-current", "page");
      else tab.removeAttribute("aria-current");
    }
    this.redraw = null;
    if (!page && (query.session || null) !== this.shownSession) await this.loadTimeline(query);
    this.timeline.select(page === "call" ? id : null);
    if (page === "call") {
      if (this.detail.firstElementChild?.localName !== "m-call") fill(this.detail, document.createElement("m-call"));
      await this.detail.firstElementChild.show(this, id);
      return;
    }
    const views = { files: filesView, compare: compareView, forks: forksView, storage: storageView, search: searchView };
    try {
      if (page === "session") this.redraw = await sessionView(this, this.detail, id);
      else if (views[page]) await views[page](this, this.detail, query);
      else if (this.isEmpty) firstLook(this, this.detail);
      else fill(this.detail, h("p.hint", "Choose a call to see what it changed. ", h("kbd", "j"), " and ", h("kbd", "k"), " move, ", h("kbd", "Enter"), " opens, ", h("kbd", "u"), " undoes."));
      this.classList.toggle("starting", !page && this.isEmpty);
    } catch (error) {
      fill(this.detail, failure(error));
    }
  }

  back() {
    if (history.length > 1) history.back();
    else location.hash = "#/";
  }

  // Events.

  happened(event) {
    const about = event.metadata || {};
    for (const id of [about.call_id, ...(about.call_ids || []), ...(about.of || [])]) if (id) this.pending.add(id);
    const { parts } = this.place();
    if (this.redraw && parts[1] === event.session_id) this.redrawSoon = true;
    const session = event.session_id;
    if (session && (event.kind === "fork" || !(this.sessions.has(session) || this.elsewhere.has(session)))) this.unknown.add(session);
    this.gathering ??= setTimeout(() => this.gather(), GATHER_MS);
  }

  async gather() {
    const ids = [...this.pending];
    this.pending.clear();
    this.gathering = null;
    const redraw = this.redrawSoon ? this.redraw : null;
    this.redrawSoon = false;
    try {
      if (this.unknown.size) await this.loadUnknown();
      if (ids.length) await this.show(ids);
      if (redraw) await redraw();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      for (const id of ids) this.pending.add(id);
    }
  }

  async show(ids) {
    if (this.isEmpty) return this.start();
    const fresh = [];
    for (let at = 0; at < ids.length; at += 200) fresh.push(...(await this.timeline.refresh(ids.slice(at, at + 200))));
    if (fresh.length) {
      this.said.textContent = fresh.length === 1 ? `New: ${said(fresh[0])}` : `${fresh.length} new calls`;
      this.fresh = this.timeline.scrollTop > 4 ? (this.fresh || 0) + fresh.length : 0;
      this.newer.hidden = !this.fresh;
      fill(this.newer, `${counted(this.fresh, "new call")} ↑`);
    }
    const open = this.detail.firstElementChild;
    if (open?.localName === "m-call" && ids.includes(open.call?.id)) await open.refresh();
  }

  connection(state) {
    const words = { live: "live", lost: "connection lost, trying again", expired: "signed out: open the address that mulligan serve prints" }[state];
    if (this.state.dataset.state === "expired" && state === "lost") return;
    this.state.dataset.state = state;
    fill(this.state, words);
    if (state === "live" && this.wasLost && this.pending.size) this.gather();
    this.wasLost = state !== "live";
  }

  // Operations. Each shows its plan first.

  async operate(act) {
    const result = await this.plan.open(act);
    if (result) this.toast(result, act);
    return result;
  }

  undo(call, parts = undefined) {
    const what = parts?.hunks ? `a hunk of ${Object.keys(parts.hunks)[0]}` : parts?.paths ? parts.paths[0] : named(call);
    return this.operate({ title: `Undo: ${what}`, verb: "Undo", path: `/calls/${enc(call.id)}/undo`, body: parts, session: call.session_id });
  }

  restore(call, parts = undefined) {
    return this.operate({ title: `Restore: ${parts?.paths ? parts.paths[0] : named(call)}`, verb: "Restore", path: `/calls/${enc(call.id)}/restore`, body: parts, session: call.session_id });
  }

  redo(session) {
    return this.operate({ title: "Redo", verb: "Redo", path: `/sessions/${enc(session)}/redo`, session });
  }

  rewind(call, side = "before") {
    return this.operate({ title: `Rewind to ${side} “${named(call)}”`, verb: "Rewind", path: `/sessions/${enc(call.session_id)}/rewind`, body: { to: call.id, side }, session: call.session_id });
  }

  merge(session) {
    return this.operate({ title: "Merge the fork", verb: "Merge", path: `/sessions/${enc(session.id)}/merge`, session: session.parent_id }).then((done) => done && this.route());
  }

  async ask(question, words, ...more) {
    const dialog = h("dialog.ask", { "aria-label": question }, h("h2", question), more);
    const answer = await new Promise((resolve) => {
      dialog.append(h("footer", button("Cancel", () => resolve(null)), words.map(([value, label, kind]) => button(label, () => resolve(value), { kind }))));
      dialog.addEventListener("cancel", () => resolve(null));
      this.append(dialog);
      dialog.showModal();
    });
    dialog.remove();
    return answer;
  }

  async fork(call) {
    await this.forkAt({ id: call.session_id }, call.id, `Fork before “${named(call)}”`);
  }

  async forkSession(session) {
    await this.forkAt(session, null, "Fork this session");
  }

  async forkAt(session, at, question) {
    const begin = at ? { at, files: "copy" } : { files: "copy" };
    const plan = await this.guard(() => post(`/sessions/${enc(session.id)}/fork`, { dry_run: true }, begin));
    if (!plan) return;
    const files = await this.ask(question, [["share", "Share the files", ""], ["copy", "Copy the files", "primary"]], h("p", `A child session goes on from here, with ${counted(plan.messages, "message")}. With a copy of the files it works in a folder of its own, which you can merge or drop later.`), forkedFiles(plan.outcomes));
    if (!files) return;
    const made = await this.guard(() => post(`/sessions/${enc(session.id)}/fork`, {}, at ? { at, files } : { files }));
    if (!made) return;
    await this.loadRoots();
    this.notice(made.directory ? "Forked, with files of its own." : "Forked.");
    await this.loadSessions();
    if (this.place().parts[0] === "forks") await this.route();
    else location.hash = "#/forks";
  }

  async drop(session) {
    const plan = await this.guard(() => post(`/sessions/${enc(session.id)}/drop`, { dry_run: true }));
    if (!plan) return;
    const sure = await this.ask("Drop this fork?", [["drop", "Delete its files", "danger"]], h("p", "This deletes the folder ", h("code", plan.directory), ". What the fork did stays in the history."));
    if (sure && (await this.guard(() => post(`/sessions/${enc(session.id)}/drop`)))) await this.route();
  }

  async guard(work) {
    try {
      return await work();
    } catch (error) {
      this.notice(error.message, "bad");
      return null;
    }
  }

  toast(result, act) {
    const done = result.outcomes.filter((one) => one.outcome === "restored" || one.outcome === "merged").length;
    const left = result.outcomes.filter((one) => one.outcome === "conflicted").length;
    const words = `${act.verb}: ${counted(done, "path")} changed${left ? `, ${left} left alone` : ""}.`;
    const more = [];
    if (result.rescue) more.push(h("a", { href: `#/call/${enc(result.rescue)}` }, "See what was replaced"));
    if (act.session && act.verb !== "Redo" && act.verb !== "Merge" && result.call_id) more.push(button("Redo …", () => this.redo(act.session), { kind: "small" }));
    this.notice(words, "", more);
  }

  notice(words, kind = "", more = []) {
    const box = h(`div.toast${kind ? "." + kind : ""}`, h("span", words), more, button("×", () => box.remove(), { kind: "quiet", "aria-label": "Close this message" }));
    this.toasts.append(box);
    while (this.toasts.children.length > 3) this.toasts.firstChild.remove();
    if (!more.length && !kind) setTimeout(() => box.remove(), 8000);
  }

  // Keys.

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.closest?.("input, textarea, select");
    if (event.key === "Escape" && typing) event.target.blur();
    if (typing || document.querySelector("dialog[open]")) return;
    const open = this.detail.firstElementChild;
    const focused = document.activeElement?.closest?.(".row")?.dataset.call;
    const { parts } = this.place();
    const opened = parts[0] === "call" ? this.timeline.calls.get(parts[1]) : null;
    const call = this.timeline.calls.get(focused) || opened || (open?.localName === "m-call" ? open.call : null);
    const may = this.me?.role === "controller";
    const acts = {
      j: () => this.timeline.step(1),
      k: () => this.timeline.step(-1),
      u: () => may && call?.status === "committed" && this.undo(call),
      r: () => may && call?.session_id && this.redo(call.session_id),
      f: () => may && call?.session_id && this.fork(call),
      "/": () => this.search.focus(),
      "?": () => this.help.showModal(),
      Escape: () => { location.hash = "#/"; },
    };
    if (acts[event.key]) {
      event.preventDefault();
      acts[event.key]();
    }
  }
}

// What a copy of the files would hold in other form than the folder now.
function forkedFiles(outcomes) {
  const back = outcomes.filter((one) => one.outcome === "restored" || one.outcome === "merged");
  const left = outcomes.filter((one) => one.outcome === "conflicted" || one.outcome === "failed");
  const list = (words, some) => (some.length ? [h("p", words), h("ul.paths", some.slice(0, 20).map((one) => h("li.path", one.path)), some.length > 20 ? h("li.dim", `and ${counted(some.length - 20, "more path")}`) : null)] : null);
  return [list("In the copy, these paths would be as they were at this point:", back), list("These would stay as they are now, because of later edits:", left)];
}

customElements.define("m-app", App);
