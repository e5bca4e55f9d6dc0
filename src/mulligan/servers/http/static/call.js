// One call: what caused it, what it changed, and what can be done about it.
import { age, button, counted, failure, fill, h, icon, sessionName, spinner } from "./dom.js";
import { enc, get, post } from "./api.js";
import { STATUS, isCommand, pathsText, reasonText, statusOf, title } from "./words.js";
import { counts, downloads, fileDiff } from "./diff.js";

const FIRST_FILES = 20;

// There is little to read about a folder.
function foldersLast(a, b) {
  return Number(a.after.kind === "dir") - Number(b.after.kind === "dir");
}

export class CallView extends HTMLElement {
  constructor() {
    super();
    this.sides = false;
  }

  // `app` carries out operations and knows the sessions.
  async show(app, id) {
    this.app = app;
    this.className = "call";
    if (this.call?.id !== id) fill(this, spinner());
    this.wanted = id;
    try {
      const call = await get(`/calls/${enc(id)}`);
      if (this.wanted !== id) return;
      const same = this.call?.id === id && this.drawn;
      this.call = call;
      this.drawHead();
      if (!same) await this.drawFiles();
    } catch (error) {
      if (this.wanted === id) fill(this, failure(error));
    }
  }

  // The call was undone, redone or ended: only its head changes, so the open diff stays where it is.
  async refresh() {
    // Somebody may have opened another call, which is still loading.
    if (!this.call || this.wanted !== this.call.id) return;
    const wasOpen = this.call.status === "open";
    await this.show(this.app, this.call.id);
    if (wasOpen) await this.drawFiles();
  }

  drawHead() {
    const call = this.call;
    const status = statusOf(call);
    this.dataset.status = call.status;
    const session = this.app.sessions.get(call.session_id);
    const name = sessionName(session || { id: call.session_id, created_at: call.started_at });
    const head = h(
      "header.call-head",
      button("Back", () => this.app.back(), { kind: "back" }),
      isCommand(call) ? h("h2.command", title(call)) : h("h2", title(call), " ", h("span.target", pathsText(call))),
      h("p.facts", h(`span.badge.${status}`, icon(call.verb ? "verb" : status), STATUS[status]), age(call.started_at), call.tool && isCommand(call) ? h("span", call.tool) : null, call.session_id ? h("a", { href: `#/session/${enc(call.session_id)}` }, call.prompt?.startsWith(name.replace(/…$/, "")) ? "Session" : name) : null, counts(call)),
      call.prompt ? h("blockquote", call.prompt) : null,
      call.status === "aborted" && call.reason ? h("p.note", `It failed: ${reasonText(call.reason)}. Mulligan put everything back.`) : null,
      this.actions(),
      this.links(),
      call.coverage.length ? this.gaps() : null,
    );
    if (this.head?.isConnected) this.head.replaceWith(head);
    else fill(this, head, (this.files = h("div.files")));
    this.head = head;
  }

  actions() {
    const call = this.call, app = this.app;
    const may = app.me.role === "controller";
    const undoable = ["committed"].includes(call.status) && call.files;
    return h(
      "div.actions",
      may && undoable ? button(call.verb ? "Take this back …" : "Undo …", () => app.undo(call), { kind: "primary", title: "u" }) : null,
      may && call.status === "undone" ? button("Redo …", () => app.redo(call.session_id), { kind: "primary", title: "r" }) : null,
      may && undoable && !call.external ? button("Restore files …", () => app.restore(call), { title: "Put these files back to what they were before this call, with all later changes of calls" }) : null,
      may && call.session_id ? button("Rewind to here …", () => app.rewind(call)) : null,
      may && call.session_id ? button("Fork here …", () => app.fork(call), { title: "f" }) : null,
    );
  }

  links() {
    const call = this.call, app = this.app;
    const pin = async () => { await app.guard(() => post(`/calls/${enc(call.id)}/pin`, {}, { pinned: !call.pinned })); await this.show(app, call.id); };
    return h(
      "div.links",
      h("a", { href: `#/files?at=${enc(call.id)}&root=${enc(call.root_id)}` }, "Files at this point"),
      h("a", { href: `#/compare?from=${enc(call.id)}&root=${enc(call.root_id)}` }, "Compare with now"),
      app.me.role === "controller" && !call.external ? button(call.pinned ? "Unpin" : "Pin", pin, { kind: "link", title: "Never drop the bytes that undo needs" }) : null,
    );
  }

  gaps() {
    const list = this.call.coverage.map((gap) => h("li", h("span.path", gap.path), " ", h("span.why", gap.why)));
    return h("details.gaps", h("summary", `${counted(this.call.coverage_total, "gap")} in what was captured`), h("ul", list));
  }

  async drawFiles() {
    const call = this.call;
    this.drawn = true;
    if (!call.changes.length) {
      fill(this.files, h("p.note", call.status === "open" ? "Still running." : "This call changed no files."));
      return;
    }
    fill(this.files, spinner("Loading the changes …"));
    const paths = [...call.changes].sort(foldersLast).map((change) => change.path);
    this.rest = paths.slice(FIRST_FILES);
    const list = h("div.diffs");
    fill(this.files, this.fileBar(), list);
    await this.addFiles(list, paths.slice(0, FIRST_FILES));
  }

  fileBar() {
    const toggle = button(this.sides ? "Unified" : "Side by side", () => { this.sides = !this.sides; this.drawFiles(); }, { kind: "quiet" });
    return h("div.file-bar", h("h3", counted(this.call.files, "changed path")), toggle);
  }

  async addFiles(list, paths) {
    const call = this.call;
    const waiting = list.appendChild(spinner("Loading the changes …"));
    try {
      const diff = await get(`/calls/${enc(call.id)}/diff`, { paths });
      if (this.call.id !== call.id) return;
      waiting.replaceWith(...diff.files.sort(foldersLast).map((file) => this.file(file)));
    } catch (error) {
      waiting.replaceWith(failure(error));
    }
    list.querySelector(":scope > .more-files")?.remove();
    if (this.rest.length || call.next) {
      const more = button(`Show more of ${counted(call.files, "path")}`, () => this.moreFiles(list), { kind: "more-files" });
      list.append(more);
    }
  }

  async moreFiles(list) {
    if (!this.rest.length && this.call.next) {
      const page = await get(`/calls/${enc(this.call.id)}`, { after: this.call.next });
      this.call.next = page.next;
      this.rest = page.changes.map((change) => change.path);
    }
    const some = this.rest.splice(0, FIRST_FILES);
    await this.addFiles(list, some);
  }

  file(file) {
    const call = this.call, app = this.app;
    // Undone calls hide these buttons by their style, so that the open diff stays as it is.
    const may = app.me.role === "controller";
    return fileDiff(file, {
      sides: this.sides,
      downloads: downloads(call.id),
      fileAction: () => [
        file.after.kind === "file" && !file.path.startsWith("/") ? h("a.small", { href: `#/files?root=${enc(call.root_id)}&path=${enc(file.path)}&blame=1` }, "Why is this here?") : null,
        may ? button(file.state === "dir" ? "Undo folder …" : "Undo file …", () => app.undo(call, { paths: [file.path] }), { kind: "small.undo", "aria-label": `Undo ${file.state === "dir" ? "folder" : "file"} … ${file.path}` }) : null,
      ],
      hunkAction: (_, hunk) => (may && file.hunks.length > 1 ? button("Undo hunk …", () => app.undo(call, { hunks: { [file.path]: [hunk.index] } }), { kind: "small.undo", "aria-label": `Undo hunk … ${hunk.index + 1} of ${file.path}` }) : null),
      more: async () => {
        const diff = await get(`/calls/${enc(call.id)}/diff`, { paths: [file.path], lines: 20_000 });
        this.querySelector(`article[data-path="${CSS.escape(file.path)}"]`)?.replaceWith(this.file(diff.files[0]));
      },
    });
  }
}

customElements.define("m-call", CallView);
