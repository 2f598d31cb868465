/**
 * EchoMQ in a page: streams that resume where they broke off, and events, over one websocket.
 * See docs/javascript.md, and docs/protocol.md for what goes over the wire.
 *
 * A Link keeps a socket alive, a Reader keeps one subscription's place and calls the page, the
 * Client joins them. One file on purpose: without a build, parts would be imported past the
 * hashed names of static files, and could be of different versions.
 *
 * A subscription has three places, each with its token. `got`: received. `taken`: its handler
 * was called. `place`: its handler is done. When the socket is lost, what was received and not
 * taken is dropped and asked for again: so a slow page holds one window, and gets nothing twice.
 */

const SUBPROTOCOL = "echomq.v1";
/** Acknowledge at once from half of the window on: 500 records, 256 kB (a unit is 3 bytes at most). */
const ACK_RECORDS = 250;
const ACK_SIZE = 64 * 1024;
const ACK_WAIT = 100;
/** What lasted so long was good: the next wait is short again. */
const GOOD = 10_000;
/** A timer that is later comes out of a suspended machine or a frozen tab. */
const LATE = 5_000;
const RETRIED = new Set(["unknown_stream", "failed", "rate"]);

/** Milliseconds. */
export const DEFAULTS = Object.freeze({
  minDelay: 500,
  maxDelay: 60_000,
  connectTimeout: 20_000,
  pingInterval: 25_000,
  pingTimeout: 10_000,
  pauseAfter: 300_000,
});

/** How long to wait. Wholly random, so that pages don't come back together. */
export function delay(attempt, { minDelay, maxDelay } = DEFAULTS, random = Math.random) {
  return Math.round(random() * Math.min(maxDelay, minDelay * 2 ** Math.min(attempt, 30)));
}

/** The records of a frame that a reader at `cursor` hasn't had, and whether one is missing. */
export function sift(cursor, frame) {
  const fresh = frame.records.filter((record) => record.position >= cursor);
  return { fresh, hole: frame.since > cursor };
}

/** Whether the same attempt would fail again after this close code. */
export function isFatal(code, hasGetToken) {
  return code === 4400 || code === 4413 || (code === 4401 && !hasGetToken);
}

/** Call a handler of the page. What it throws is reported, and goes no further. */
async function call(handler, ...args) {
  try {
    return await handler?.(...args);
  } catch (error) {
    (globalThis.reportError ?? console.error)(error);
  }
}

/** One socket that comes back by itself. */
class Link {
  state = "connecting";
  #url;
  #options;
  #on;
  #socket = null;
  #turn = null; // of the socket that counts; what an older one reports is ignored
  #attempt = 0;
  #openedAt = 0;
  #welcomes = 0;
  #lastError = null;
  #timer = 0; // to give up connecting, to connect again, or of the watchdog
  #due = 0;
  #heard = 0;
  #pinged = false;
  #spared = false;
  #hidden = 0;
  #listening = new AbortController();

  constructor(url, options, on) {
    this.#url = new URL(url, globalThis.location?.href);
    this.#url.protocol = this.#url.protocol.replace("http", "ws");
    this.#options = { ...DEFAULTS, ...options };
    this.#on = on;
    const { signal } = this.#listening;
    const listen = (target, type, f) => target?.addEventListener?.(type, f, { signal });
    listen(globalThis, "online", () => this.state !== "paused" && this.#wake());
    // An open socket keeps a page out of the back/forward cache.
    listen(globalThis, "pagehide", () => this.#pause());
    listen(globalThis, "pageshow", ({ persisted }) => persisted && this.#wake());
    listen(globalThis.document, "visibilitychange", () => this.#look());
    this.#look();
    queueMicrotask(() => this.#connect());
  }

  send(...frames) {
    if (this.state !== "open" || frames.length === 0) return;
    this.#socket.send(JSON.stringify(frames.length === 1 ? frames[0] : frames));
  }

  close(info = {}) {
    if (this.state === "closed") return;
    this.#listening.abort();
    clearTimeout(this.#hidden);
    this.#abandon();
    this.#become("closed", info);
  }

  async #connect() {
    if (this.state === "closed") return;
    this.#abandon();
    const turn = (this.#turn = {});
    const current = (f) => (event) => turn === this.#turn && f(event);
    const { WebSocketImpl = WebSocket, getToken, connectTimeout } = this.#options;
    this.#become("connecting");
    this.#timer = setTimeout(() => this.#retry(), connectTimeout);
    let token, socket;
    try {
      token = await getToken?.();
    } catch (error) {
      const message = String(error);
      if (turn === this.#turn) this.#frame({ type: "error", code: "bad_token", message });
    }
    if (turn !== this.#turn) return;
    try {
      socket = this.#socket = new WebSocketImpl(this.#url.href, SUBPROTOCOL);
    } catch (error) {
      return this.close({ code: 0, reason: String(error) }); // the page may not open it, ever
    }
    // The second answers `auth`: before it we are nobody, and may be denied.
    this.#welcomes = token ? 2 : 1;
    socket.onopen = current(() => {
      if (token) socket.send(JSON.stringify({ type: "auth", token }));
    });
    socket.onmessage = current(({ data }) => this.#message(data, turn));
    socket.onclose = current(({ code, reason }) => this.#closed(code, reason));
  }

  #message(data, turn) {
    this.#heard = Date.now();
    this.#pinged = this.#spared = false;
    let frames;
    try {
      frames = [JSON.parse(data)].flat();
    } catch {
      return this.#retry();
    }
    for (const frame of frames) {
      if (turn !== this.#turn) return;
      this.#frame(frame, data.length / frames.length);
    }
  }

  #frame(frame, size) {
    if (frame.type === "welcome") {
      this.#welcomes -= 1;
      if (this.#welcomes === 0) this.#open();
    } else {
      if (frame.type === "error") this.#lastError = frame;
      this.#on.frame(frame, size);
      if (frame.code === "bad_token") this.#retry();
    }
  }

  #open() {
    this.#openedAt = Date.now();
    this.#lastError = null;
    this.#become("open");
    this.#watch(this.#options.pingInterval);
    this.#on.open();
  }

  #closed(code, reason) {
    if (!isFatal(code, this.#options.getToken)) return this.#retry();
    this.close({ code, reason: this.#lastError?.message || reason });
  }

  #retry() {
    if (this.state === "closed") return;
    this.#abandon();
    if (this.#openedAt && Date.now() - this.#openedAt >= GOOD) this.#attempt = 0;
    this.#openedAt = 0;
    const retryIn = delay(this.#attempt, this.#options);
    this.#attempt += 1;
    this.#timer = setTimeout(() => this.#connect(), retryIn);
    this.#become("waiting", { retryIn });
  }

  // Hidden tabs

  #look() {
    clearTimeout(this.#hidden);
    const { pauseAfter } = this.#options;
    if (globalThis.document?.visibilityState !== "hidden") this.#wake();
    else if (pauseAfter < 2 ** 31) this.#hidden = setTimeout(() => this.#pause(), pauseAfter);
  }

  #wake() {
    if (this.state === "waiting" || this.state === "paused") this.#connect();
    else if (this.state === "open" && !this.#pinged) this.#ping();
  }

  #pause() {
    if (this.state === "closed") return;
    this.#abandon();
    this.#become("paused");
  }

  // The watchdog, for a connection that is dead without a word

  #watch(wait) {
    clearTimeout(this.#timer);
    this.#due = Date.now() + wait;
    this.#timer = setTimeout(() => this.#check(), wait);
  }

  #check() {
    const { pingInterval } = this.#options;
    const silence = Date.now() - this.#heard;
    if (this.#pinged) {
      // After a sleep the answer may be there, and only not have been read yet. Once.
      if (this.#spared || Date.now() - this.#due < LATE) return this.#retry();
      this.#spared = true;
    } else if (silence < pingInterval) {
      return this.#watch(Math.min(pingInterval, pingInterval - silence));
    }
    this.#ping();
  }

  #ping() {
    this.#pinged = true;
    this.send({ type: "ping" });
    this.#watch(this.#options.pingTimeout);
  }

  #abandon() {
    const wasOpen = this.state === "open";
    clearTimeout(this.#timer);
    this.#turn = null;
    this.#pinged = this.#spared = false;
    this.#socket?.close();
    this.#socket = null;
    if (wasOpen) this.#on.lost();
  }

  #become(state, info = {}) {
    if (state === this.state) return;
    this.state = state;
    this.#on.state(state, info);
  }
}

/** One subscription: its place, its queue, its acks. */
class Reader {
  sub = 0; // its number on this socket; 0: none
  ended = false;
  onEnd = null;
  place;
  #taken;
  #queue = [];
  #busy = false;
  #life = 0;
  #cursor = null;
  #records = 0;
  #size = 0;
  #attempt = 0;
  #startedAt = 0;
  #timer = 0;

  constructor(wire, handlers, place) {
    this.wire = wire;
    this.handlers = handlers;
    this.got = this.#taken = this.place = place;
  }

  start() {
    this.#startedAt = Date.now();
    this.sub = this.wire.subscribe(this);
  }

  /** Forget what was received and not handed out; the next start asks for it again. */
  lost() {
    clearTimeout(this.#timer);
    this.sub = 0;
    this.disown();
    this.#queue = [];
    this.got = this.#taken;
  }

  /** Acknowledge nothing of what was received so far. */
  disown() {
    this.#life += 1;
    this.#records = this.#size = 0;
    this.#cursor = null;
  }

  retry() {
    this.wire.release(this.sub);
    this.lost();
    if (Date.now() - this.#startedAt >= GOOD) this.#attempt = 0;
    this.#timer = setTimeout(() => this.start(), delay(this.#attempt, this.wire.options));
    this.#attempt += 1;
  }

  /** Begin anew, elsewhere. */
  moveTo(place) {
    this.wire.release(this.sub);
    this.#taken = place;
    this.lost();
    this.start();
  }

  end(error) {
    if (this.ended) return;
    this.ended = true;
    this.wire.release(this.sub);
    this.wire.forget(this);
    this.lost();
    if (error) call(this.handlers.onError, { ...error, final: true });
    this.onEnd?.();
  }

  receive(frame, size) {
    if (frame.type !== "error") return this[`on_${frame.type}`]?.(frame, size);
    const { code, message } = frame;
    if (!RETRIED.has(code)) return this.end({ code, message });
    call(this.handlers.onError, { code, message, final: false });
    if (!this.ended) this.retry();
  }

  /** Have `run` called after all that came before. `ack`: the cursor that it is worth. */
  enqueue(run, { ack = null, records = 0, size = 0 } = {}) {
    this.#queue.push({ run, ack, records, size, place: this.got, life: this.#life });
    if (!this.#busy) this.#drain();
  }

  async #drain() {
    this.#busy = true;
    while (this.#queue.length > 0) {
      const { run, ack, records, size, place, life } = this.#queue.shift();
      this.#taken = place;
      await run();
      this.place = this.#taken;
      this.keep?.();
      if (ack === null || life !== this.#life) continue;
      this.#cursor = ack;
      this.#records += records;
      this.#size += size;
      this.wire.acknowledge(this.#records >= ACK_RECORDS || this.#size >= ACK_SIZE);
    }
    this.#busy = false;
  }

  ack() {
    if (this.#cursor === null) return [];
    const frame = { type: "ack", sub: this.sub, cursor: this.#cursor };
    this.#records = this.#size = 0;
    this.#cursor = null;
    return [frame];
  }
}

/** Read or write session storage, if the page may and it isn't full. */
function kept(key, token) {
  try {
    return token ? sessionStorage.setItem(key, token) : sessionStorage.getItem(key);
  } catch {
    return null;
  }
}

class StreamReader extends Reader {
  #name;
  #from;
  #filter;

  constructor(wire, name, options) {
    const { persist, resume, from, types, key } = options;
    super(wire, options, { token: (persist && kept(persist)) || resume, cursor: null, epoch: null });
    this.#name = name;
    this.#from = from;
    this.#filter = { types: types && [types].flat(), key };
  }

  request() {
    const { token } = this.got;
    // Too long is a bad frame, which says nothing of the subscription. Cut, it is a bad token.
    const place = token ? { resume: String(token).slice(0, 255) } : { from: this.#from };
    return { stream: this.#name, ...place, ...this.#filter };
  }

  keep() {
    if (this.handlers.persist) kept(this.handlers.persist, this.place.token);
  }

  on_subscribed({ type, sub, ...info }) {
    const { epoch, cursor, resume, recovered } = info;
    // Not recovered: until `cursor_expired` is here too, only the old token tells of the loss.
    if (recovered) {
      const goesOn = epoch === this.got.epoch && this.got.cursor !== null;
      this.got = { token: resume, epoch, cursor: goesOn ? this.got.cursor : cursor };
    }
    this.enqueue(() => call(this.handlers.onSubscribed, info));
  }

  on_records(frame, size) {
    const { since, records, cursor, resume, head } = frame;
    const expected = this.got.cursor ?? since;
    const { fresh, hole } = sift(expected, frame);
    if (hole) return this.retry();
    if (cursor >= expected) this.got = { ...this.got, token: resume, cursor };
    const info = { cursor, resume, head };
    this.enqueue(() => this.#hand(fresh, info), { ack: cursor, records: records.length, size });
  }

  async #hand(records, info) {
    const { onRecords, onRecord } = this.handlers;
    if (records.length > 0) await call(onRecords, records, info);
    for (const record of onRecord ? records : []) {
      if (!this.ended) await call(onRecord, record, info);
    }
  }

  on_cursor_expired({ type, sub, ...info }) {
    const { epoch, cursor, resume } = info;
    this.got = { token: resume, cursor, epoch };
    this.disown(); // this frame stands for them all, and cursors of an old epoch may be higher
    const run = async () => {
      if ((await call(this.handlers.onCursorExpired, info)) !== "first" || this.ended) return;
      this.#from = "first";
      this.moveTo({ token: null, cursor: null, epoch });
    };
    this.enqueue(run, { ack: cursor });
  }
}

class EventsReader extends Reader {
  #queue;
  #again = false;

  constructor(wire, queue, handlers) {
    super(wire, handlers, {});
    this.#queue = queue;
  }

  request() {
    return { events: this.#queue };
  }

  on_subscribed() {
    const { onGap, onSubscribed } = this.handlers;
    // Only this side knows that it was away.
    if (this.#again) this.enqueue(() => call(onGap, { reason: "reconnect" }));
    this.#again = true;
    this.enqueue(() => call(onSubscribed, {}));
  }

  on_event({ type, sub, ...event }, size) {
    const run = () => call(this.handlers.onEvent, event);
    this.enqueue(run, { ack: event.number + 1, records: 1, size });
  }

  on_gap({ reason }) {
    this.enqueue(() => call(this.handlers.onGap, { reason }));
  }
}

/** What a page holds of a subscription. */
class Subscription {
  #reader;

  constructor(reader, name) {
    this.#reader = reader;
    this.name = name;
  }

  /** The token of everything that the handlers are done with. */
  get resume() {
    return this.#reader.place.token ?? undefined;
  }

  get ended() {
    return this.#reader.ended;
  }

  unsubscribe() {
    this.#reader.end();
  }

  /** The records one by one, instead of by `onRecords`. */
  async *[Symbol.asyncIterator]() {
    const reader = this.#reader;
    let frame, wake;
    reader.onEnd = () => wake?.();
    const onRecords = (records) =>
      new Promise((done) => {
        frame = { records, done };
        wake?.();
      });
    reader.handlers = { ...reader.handlers, onRecords };
    try {
      while (!reader.ended) {
        const { records = [], done } = frame ?? {};
        frame = null;
        for (const record of records) {
          if (!reader.ended) yield record;
        }
        done?.();
        if (!done) await new Promise((resolve) => (wake = resolve));
      }
    } finally {
      reader.end();
    }
  }
}

class Client {
  #link;
  #wire;
  #readers = new Set();
  #bySub = new Map();
  #lastSub = 0;
  #listeners = new Set();
  #now = ["connecting", {}];
  #ackTimer = 0;

  constructor(url, options) {
    const { onError = console.error } = options;
    this.#link = new Link(url, options, {
      open: () => this.#readers.forEach((reader) => reader.start()),
      lost: () => this.#lost(),
      frame: (frame, size) => {
        const reader = this.#bySub.get(frame.sub);
        if (frame.type === "error") {
          this.#bySub.delete(frame.sub);
          // It may have ended there while we unsubscribed.
          if (frame.sub === undefined && frame.code !== "unknown_sub") call(onError, frame);
        }
        reader?.receive(frame, size);
      },
      state: (state, info) => this.#become(state, info),
    });
    this.#wire = {
      options: { ...DEFAULTS, ...options },
      subscribe: (reader) => this.#subscribe(reader),
      release: (sub) => this.#bySub.delete(sub) && this.#link.send({ type: "unsubscribe", sub }),
      forget: (reader) => this.#readers.delete(reader),
      acknowledge: (atOnce) => this.#acknowledge(atOnce),
    };
  }

  get state() {
    return this.#link.state;
  }

  stream(name, options = {}) {
    return this.#add(new StreamReader(this.#wire, name, options), name);
  }

  events(queue, options = {}) {
    return this.#add(new EventsReader(this.#wire, queue, options), queue);
  }

  /** Tell the state, now and at each change. Returns how to stop it. */
  onState(listener) {
    this.#listeners.add(listener);
    call(listener, ...this.#now);
    return () => this.#listeners.delete(listener);
  }

  close() {
    this.#link.close();
  }

  #add(reader, name) {
    if (typeof name !== "string" || !name) throw new TypeError(`no name to follow: ${name}`);
    if (this.state === "closed") throw new Error("this client is closed: connect() again");
    this.#readers.add(reader);
    reader.start();
    return new Subscription(reader, name);
  }

  #subscribe(reader) {
    if (this.#link.state !== "open") return 0;
    const sub = ++this.#lastSub;
    this.#bySub.set(sub, reader);
    // One message each: a server that can't read one frame of a message refuses all of it.
    this.#link.send({ type: "subscribe", sub, ...reader.request() });
    return sub;
  }

  #acknowledge(atOnce) {
    if (atOnce) this.#flush();
    else this.#ackTimer ||= setTimeout(() => this.#flush(), ACK_WAIT);
  }

  #flush() {
    clearTimeout(this.#ackTimer);
    this.#ackTimer = 0;
    this.#link.send(...[...this.#readers].flatMap((reader) => reader.ack()));
  }

  #lost() {
    clearTimeout(this.#ackTimer);
    this.#ackTimer = 0;
    this.#bySub.clear();
    this.#readers.forEach((reader) => reader.lost());
  }

  #become(state, info) {
    this.#now = [state, info];
    if (state === "closed") {
      const { code, reason } = info;
      const error = code === undefined ? null : { code: "closed", message: reason || `${code}` };
      this.#readers.forEach((reader) => reader.end(error));
    }
    this.#listeners.forEach((listener) => call(listener, state, info));
  }
}

/** Connect, now and whenever it has to be. */
export function connect(url = "/ws/echomq/", options = {}) {
  return new Client(url, options);
}
