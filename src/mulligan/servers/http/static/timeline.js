// The list of calls: grouped by prompt, windowed, and changed row by row.
import { age, add, fill, h, icon } from "./dom.js";
import { enc, get } from "./api.js";
import { STATUS, detailsOf, isCommand, pathsText, statusOf, title } from "./words.js";

const ROW = 64;
const HEAD = 52;
const MARGIN = 800;

export class Timeline extends HTMLElement {
  constructor() {
    super();
    this.calls = new Map();
    this.order = [];
    this.items = [];
    this.rows = new Map();
    this.selected = null;
    this.next = null;
    this.scope = {};
    this.loading = false;
    // The name of a session where several are in the list; `app` sets it.
    this.sessionOf = () => null;
  }

  connectedCallback() {
    if (this.spacer) return;
    this.className = "timeline";
    this.setAttribute("role", "list");
    this.setAttribute("aria-label", "Calls, newest first");
    this.spacer = h("div.spacer");
    this.append(this.spacer);
    this.addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.draw()).observe(this);
  }

  // Another root or session: the list begins anew.
  async load(scope) {
    this.scope = scope;
    const page = await get("/calls", { ...scope, limit: 100 });
    if (this.scope !== scope) return page;
    this.calls.clear();
    this.take(page.calls);
    this.next = page.next;
    this.arrange();
    this.scrollTop = 0;
    this.draw();
    return page;
  }

  async more() {
    if (this.loading || !this.next) return;
    this.loading = true;
    try {
      const scope = this.scope;
      const page = await get("/calls", { ...scope, limit: 200, before: this.next });
      if (this.scope !== scope) return;
      this.take(page.calls);
      this.next = page.next;
      this.arrange();
      this.draw();
    } finally {
      this.loading = false;
    }
  }

  take(calls) {
    for (const call of calls) {
      const known = this.calls.get(call.id);
      if (known && JSON.stringify(known) === JSON.stringify(call)) continue;
      this.calls.set(call.id, call);
      this.rows.get(call.id)?.remove();
      this.rows.delete(call.id);
    }
  }

  // Calls that began, ended or were undone. What the reader looks at stays where it is. The calls that are new.
  async refresh(ids) {
    const scope = this.scope;
    const page = await get("/calls", { ids: ids.join(",") });
    if (this.scope !== scope) return [];
    const belongs = page.calls.filter((call) => this.inScope(call));
    const fresh = belongs.filter((call) => !this.calls.has(call.id));
    const anchor = this.anchor();
    const focused = document.activeElement?.closest?.(".row")?.dataset.call;
    this.take(belongs);
    this.arrange();
    if (anchor) this.scrollTop = Math.max(0, this.topOf(anchor.key) + anchor.offset);
    this.draw();
    if (focused) this.rows.get(focused)?.querySelector("a").focus({ preventScroll: true });
    return fresh;
  }

  inScope(call) {
    if (this.scope.session) return call.session_id === this.scope.session;
    return !this.scope.root || call.root_id === this.scope.root;
  }

  // The first row in view; null at the very top while nothing is open, so that new calls are seen there.
  anchor() {
    if (this.scrollTop < 4 && !this.selected) return null;
    const item = this.items.find((one) => one.top + one.height > this.scrollTop && one.call);
    return item ? { key: item.key, offset: this.scrollTop - item.top } : null;
  }

  topOf(key) {
    return this.items.find((one) => one.key === key)?.top ?? 0;
  }

  // Newest first; an outside edit stands below the call that found it, as the server lists it.
  arrange() {
    this.order = [...this.calls.values()].sort((a, b) => (a.sort < b.sort ? 1 : -1));
    const items = [];
    let group = null, top = 0;
    for (const call of this.order) {
      const turn = call.external ? group : `${call.session_id}/${call.prompt ? call.turn_id : ""}`;
      if (turn !== group) {
        group = turn;
        // A prompt has several groups if the calls of another session are between its calls.
        items.push({ key: `g:${call.id}`, height: HEAD, top, head: call });
        top += HEAD;
      }
      items.push({ key: call.id, height: ROW, top, call });
      top += ROW;
    }
    this.items = items;
    this.height = top;
    this.spacer.style.height = `${top}px`;
    this.classList.toggle("empty", !items.length);
  }

  draw() {
    const from = this.scrollTop - MARGIN, to = this.scrollTop + this.clientHeight + MARGIN;
    const focused = document.activeElement?.closest?.(".row")?.dataset.call;
    const wanted = new Set();
    for (let n = this.firstAfter(from); n < this.items.length && this.items[n].top < to; n++) {
      wanted.add(this.items[n].key);
      this.place(this.items[n]);
    }
    for (const [key, row] of this.rows) {
      if (!wanted.has(key) && key !== focused) {
        row.remove();
        this.rows.delete(key);
      }
    }
    if (this.scrollTop + this.clientHeight > this.height - 2000) this.more();
  }

  firstAfter(top) {
    let low = 0, high = this.items.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.items[middle].top + this.items[middle].height < top) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  place(item) {
    let row = this.rows.get(item.key);
    if (!row) {
      row = item.head ? this.head(item.head) : this.row(item.call);
      this.rows.set(item.key, row);
      this.spacer.append(row);
    }
    const at = `translateY(${item.top}px)`;
    if (row.style.transform !== at) row.style.transform = at;
    if (item.call) {
      const chosen = item.key === this.selected;
      row.classList.toggle("selected", chosen);
      if (chosen) row.firstChild.setAttribute("aria-current", "true");
      else row.firstChild.removeAttribute("aria-current");
    }
  }

  head(call) {
    const words = call.prompt ? h("span.prompt", `“${call.prompt}”`) : h("span.prompt.none", call.session_id ? "Without a prompt" : "Outside any session");
    const session = this.sessionOf(call);
    return h("div.group", { role: "listitem" }, words, session ? h("span.session-name", session) : null);
  }

  row(call) {
    const status = statusOf(call);
    const counts = call.added === null || (!call.added && !call.removed) ? null : h("span.counts", h("span.plus", `+${call.added}`), " ", h("span.minus", `−${call.removed}`));
    const gaps = call.coverage_total ? h("span.badge.gap", { title: "Mulligan could not capture everything that this call did" }, call.coverage_total === 1 ? "1 gap" : `${call.coverage_total} gaps`) : null;
    const words = isCommand(call) ? h("span.title.command", title(call)) : h("span.title", title(call), " ", h("span.target", pathsText(call)));
    const under = add(h("span.under"), [h(`span.status.${status}`, STATUS[status]), age(call.started_at), ...detailsOf(call)].flatMap((one, n) => (n ? [" · ", one] : [one])));
    return h(
      `div.row.is-${status}`,
      { role: "listitem", data: { call: call.id } },
      h("a", { href: `#/call/${enc(call.id)}` }, h(`span.state.${status}`, icon(call.verb ? "verb" : status)), h("span.what", words, under), h("span.side", counts, gaps)),
    );
  }

  select(id) {
    this.selected = id;
    for (const [key, row] of this.rows) {
      if (!row.dataset.call) continue;
      row.classList.toggle("selected", key === id);
      if (key === id) row.firstChild.setAttribute("aria-current", "true");
      else row.firstChild.removeAttribute("aria-current");
    }
  }

  // Move the focus by rows: what j and k do.
  step(by) {
    const now = document.activeElement?.closest?.(".row")?.dataset.call ?? this.selected;
    const calls = this.items.filter((item) => item.call);
    const at = calls.findIndex((item) => item.key === now);
    const item = calls[Math.min(calls.length - 1, Math.max(0, at < 0 ? 0 : at + by))];
    if (!item) return;
    if (item.top < this.scrollTop + HEAD) this.scrollTop = Math.max(0, item.top - HEAD);
    if (item.top + item.height > this.scrollTop + this.clientHeight) this.scrollTop = item.top + item.height - this.clientHeight;
    this.draw();
    this.rows.get(item.key)?.querySelector("a").focus({ preventScroll: true });
  }

  clear(message) {
    this.calls.clear();
    this.items = [];
    this.rows.clear();
    fill(this.spacer, message ? h("p.note", message) : null);
  }
}

customElements.define("m-timeline", Timeline);
