/** A clock, a browser window and a websocket that tests hold in their hands. */

import { connect } from "../../echomq_app/static/echomq/echomq.js";

export const WELCOME = { type: "welcome", user: true };

/** Let everything that waits for a promise go on. `setImmediate` is not mocked. */
export const settle = () => new Promise((resolve) => setImmediate(resolve));

export class FakeSocket {
  static made = [];
  readyState = 0;
  sent = [];
  code = null;

  constructor(url, protocol) {
    Object.assign(this, { url, protocol });
    FakeSocket.made.push(this);
  }

  send(text) {
    if (this.readyState !== 1) throw new Error("InvalidStateError");
    const message = JSON.parse(text);
    this.sent.push(...[message].flat());
    this.onsend?.([message].flat());
  }

  close() {
    this.readyState = 3;
  }

  // What the other end does

  accept() {
    this.readyState = 1;
    this.onopen?.();
  }

  say(...frames) {
    this.onmessage?.({ data: JSON.stringify(frames.length === 1 ? frames[0] : frames) });
  }

  die(code = 1006, reason = "") {
    this.readyState = 3;
    this.onclose?.({ code, reason });
  }

  of(type) {
    return this.sent.filter((frame) => frame.type === type);
  }
}

/** Mock the time, `Math.random` (to 1: the longest wait), the window and session storage. */
export function stage(t) {
  t.mock.timers.enable({ apis: ["setTimeout", "Date"], now: 1_000_000 });
  t.mock.method(Math, "random", () => 1);
  const page = new EventTarget();
  const stored = new Map();
  page.document = Object.assign(new EventTarget(), { visibilityState: "visible" });
  const globals = {
    document: page.document,
    location: { href: "https://example.org/page/" },
    addEventListener: page.addEventListener.bind(page),
    sessionStorage: {
      getItem: (key) => stored.get(key) ?? null,
      setItem: (key, value) => stored.set(key, value),
    },
  };
  const before = Object.getOwnPropertyDescriptors(globalThis);
  for (const [name, value] of Object.entries(globals)) {
    Object.defineProperty(globalThis, name, { value, configurable: true, writable: true });
  }
  t.after(() => {
    for (const name of Object.keys(globals)) {
      if (before[name]) Object.defineProperty(globalThis, name, before[name]);
      else delete globalThis[name];
    }
  });
  FakeSocket.made = [];
  return new Stage(t.mock.timers, page, stored);
}

class Stage {
  constructor(timers, page, stored) {
    Object.assign(this, { timers, page, stored, states: [], infos: [], errors: [] });
  }

  get socket() {
    return FakeSocket.made.at(-1);
  }

  get sockets() {
    return FakeSocket.made.length;
  }

  connect(options = {}) {
    const onError = (error) => this.errors.push(error);
    const client = connect("/ws/echomq/", { WebSocketImpl: FakeSocket, onError, ...options });
    client.onState((state, info) => {
      this.states.push(state);
      this.infos.push(info);
    });
    return client;
  }

  /** A client whose socket is open. */
  async open(options = {}) {
    const client = this.connect(options);
    await this.accept();
    return client;
  }

  /** Let the newest socket through, and greet it. */
  async accept() {
    await settle();
    this.socket.accept();
    this.socket.say(WELCOME);
    await settle();
    return this.socket;
  }

  /** Let time pass step by step, so that timers set on the way fire in their turn. */
  async pass(milliseconds) {
    for (let left = milliseconds; left > 0; left -= 50) {
      this.timers.tick(Math.min(left, 50));
      await settle();
    }
  }

  /** The lid is closed. When it is opened, all timers that were due meanwhile fire, late. */
  sleep(milliseconds) {
    this.timers.setTime(Date.now() + milliseconds);
  }

  async hide() {
    this.page.document.visibilityState = "hidden";
    this.page.document.dispatchEvent(new Event("visibilitychange"));
    await settle();
  }

  async show() {
    this.page.document.visibilityState = "visible";
    this.page.document.dispatchEvent(new Event("visibilitychange"));
    await settle();
  }

  async fire(type, more = {}) {
    this.page.dispatchEvent(Object.assign(new Event(type), more));
    await settle();
  }
}

export const record = (position, more = {}) => ({ id: `EVT${position}`, position, ...more });

export const subscribed = (sub, cursor, more = {}) => ({
  type: "subscribed",
  sub,
  epoch: "e1",
  cursor,
  first: 0,
  head: cursor,
  recovered: true,
  resume: `e1:${cursor}:`,
  ...more,
});

export const records = (sub, from, to, more = {}) => ({
  type: "records",
  sub,
  since: from,
  records: Array.from({ length: to - from }, (_, i) => record(from + i)),
  cursor: to,
  resume: `e1:${to}:x`,
  head: to,
  ...more,
});

export const expired = (sub, requested, cursor, more = {}) => ({
  type: "cursor_expired",
  sub,
  reason: "trimmed",
  requested,
  first: cursor - 1,
  head: cursor,
  epoch: "e1",
  cursor,
  resume: `e1:${cursor}:x`,
  ...more,
});

/** A promise and the function that fulfils it. */
export function gate() {
  let open;
  const promise = new Promise((resolve) => (open = resolve));
  return { promise, open };
}
