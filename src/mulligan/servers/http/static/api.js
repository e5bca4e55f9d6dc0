// Talking to the server: JSON requests, and one stream of events for the whole page.

const BASE = "/api/v1";
let csrf = null;

export class ApiError extends Error {
  constructor(status, body) {
    super(body?.error?.message || `The server answered ${status}.`);
    this.status = status;
    this.code = body?.error?.code;
    this.body = body;
  }
}

async function ask(method, path, query = {}, body = undefined, headers = {}) {
  const url = new URL(BASE + path, location.origin);
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined) url.searchParams.append(name, one === true ? "1" : one);
    }
  }
  const options = { method, headers: { ...headers }, credentials: "same-origin" };
  if (method !== "GET") {
    options.headers["x-mulligan-csrf"] = csrf;
    options.headers["content-type"] = "application/json";
    options.body = JSON.stringify(body ?? {});
  }
  let answer;
  try {
    answer = await fetch(url, options);
  } catch {
    document.dispatchEvent(new CustomEvent("connection", { detail: "lost" }));
    throw new ApiError(0, { error: { message: "The server does not answer. The page goes on by itself when it does." } });
  }
  if (answer.status === 401) document.dispatchEvent(new CustomEvent("connection", { detail: "expired" }));
  const found = await answer.json().catch(() => null);
  if (!answer.ok) throw new ApiError(answer.status, found);
  return found;
}

export const get = (path, query) => ask("GET", path, query);
export const post = (path, query, body, headers) => ask("POST", path, query, body, headers);
export const enc = encodeURIComponent;

export function link(path, query = {}) {
  const url = new URL(BASE + path, location.origin);
  for (const [name, value] of Object.entries(query)) if (value !== null && value !== undefined) url.searchParams.set(name, value);
  return url.pathname + url.search;
}

export async function whoAmI() {
  const me = await get("/me");
  csrf = me.csrf;
  return me;
}

// Events of all roots. EventSource comes back by itself with Last-Event-ID; when the server closed the stream for good
// (401, or too many streams), we try again more and more slowly.
export class Events {
  constructor(onEvent, onState) {
    this.onEvent = onEvent;
    this.onState = onState;
    this.last = null;
    this.wait = 1000;
  }

  open(after) {
    this.last = Math.max(after ?? 0, this.last ?? 0);
    this.source?.close();
    this.source = new EventSource(`${BASE}/events?after=${this.last}`);
    this.source.onopen = () => {
      this.wait = 1000;
      this.onState("live");
    };
    this.source.onmessage = (message) => {
      this.last = Number(message.lastEventId);
      this.onEvent(JSON.parse(message.data));
    };
    this.source.onerror = () => {
      this.onState("lost");
      if (this.source.readyState === EventSource.CLOSED) {
        setTimeout(() => this.again(), this.wait);
        this.wait = Math.min(30_000, this.wait * 2);
      }
    };
  }

  async again() {
    try {
      await whoAmI();
      this.open(this.last);
    } catch (error) {
      this.onState(error.status === 401 ? "expired" : "lost");
      setTimeout(() => this.again(), this.wait);
      this.wait = Math.min(30_000, this.wait * 2);
    }
  }
}
