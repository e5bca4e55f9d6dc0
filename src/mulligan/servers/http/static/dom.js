// Making elements. Every text goes into a text node; nothing here, and nothing else in the page, parses markup.

// Characters that hide, move or reverse what is around them are written out.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

export function visible(text) {
  return String(text).replace(HIDDEN, (c) => (c === "\t" ? c : `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`));
}

// Attributes that a person reads or hears.
const SHOWN = new Set(["title", "aria-label", "placeholder"]);

// h("button.primary", {onclick, "aria-label": …}, children…): a child is text, an element, or null.
export function h(spec, props = {}, ...children) {
  if (props === null || typeof props !== "object" || props instanceof Node || Array.isArray(props)) {
    children.unshift(props);
    props = {};
  }
  const [tag, ...classes] = spec.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name in element && name !== "list" && name !== "role" && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : SHOWN.has(name) ? visible(value) : value);
  }
  add(element, children);
  return element;
}

export function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren();
  return add(element, children);
}

export function button(label, onclick, more = {}) {
  const { kind = "", ...props } = more;
  return h(`button${kind ? "." + kind : ""}`, { type: "button", onclick, ...props }, label);
}

const ICONS = {
  committed: "M3 8.5l3.2 3L13 4.5",
  aborted: "M4 4l8 8M12 4l-8 8",
  undone: "M6 4L2.5 7.5 6 11M3 7.5h6.5a3.5 3.5 0 010 7H7",
  external: "M11 3l2 2-7.5 7.5L3 13l.5-2.5z",
  open: "M8 4v4l2.5 2",
  evicted: "M3 8h10",
  verb: "M6 4L2.5 7.5 6 11M3 7.5h6.5a3.5 3.5 0 010 7H7",
  folder: "M2 4h4l1.5 1.5H14V13H2z",
  file: "M4 2h5l3 3v9H4z",
};

// A small drawing; its meaning is always beside it in words.
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", ICONS[name] || ICONS.committed);
  svg.append(path);
  return svg;
}

export function ago(moment, now = Date.now()) {
  const seconds = Math.max(0, Math.round((now - Date.parse(moment)) / 1000));
  if (seconds < 10) return "just now";
  for (const [size, name] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= size) return `${Math.floor(seconds / size)} ${name} ago`;
  }
  return `${seconds} s ago`;
}

export function age(moment) {
  return h("time", { datetime: moment, title: new Date(moment).toLocaleString(), data: { age: moment } }, ago(moment));
}

setInterval(() => {
  for (const element of document.querySelectorAll("time[data-age]")) {
    const text = ago(element.dataset.age);
    if (element.textContent !== text) element.textContent = text;
  }
}, 10_000);

export function bytes(count) {
  if (count === null || count === undefined) return "";
  for (const [unit, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (count >= unit) return `${(count / unit).toFixed(1)} ${name}`;
  }
  return `${count} B`;
}

export function counted(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

const NAME_MAX = 100;

export function sessionName(session) {
  if (!session) return "outside any session";
  if (session.title) return session.title.length > NAME_MAX ? `${session.title.slice(0, NAME_MAX)}…` : session.title;
  return /^[0-9a-f-]{32,}$/i.test(session.id) ? `Session of ${new Date(session.created_at).toLocaleString()}` : session.id;
}

// The copy of a fork has the name of its session; its folder is named after an id.
export function rootName(root) {
  return root.fork_of ? `${root.title || "Fork"} (own files)` : root.name;
}

export function spinner(text = "Loading …") {
  return h("p.loading", { role: "status" }, text);
}

export function failure(error) {
  return h("p.failure", { role: "alert" }, error.message || String(error));
}
