/**
 * One websocket that comes back by itself, unless the user holds it down.
 *
 * What it carries and where to resume is the caller's affair: `onOpen` sends the
 * request, `onFrame` gets the frames one by one. States: "connecting", "open",
 * "waiting" (for the next attempt) and "dropped" (by the user).
 */

import { delay } from "./backoff.js";

/** The server sends something at least every 5 s; after this silence the line is dead. */
const SILENCE = 15_000;

export class Connection {
  #url;
  #handlers;
  #socket = null;
  #attempt = 0;
  #timer = 0;
  #watchdog = 0;
  state = "connecting";

  /** `handlers`: onOpen(), onFrame(frame), onState(state, milliseconds until the next attempt). */
  constructor(url, handlers) {
    this.#url = url;
    this.#handlers = handlers;
    addEventListener("online", () => {
      if (this.state === "waiting") this.#connect();
    });
    this.#connect();
  }

  /** Cut the connection and stay away until `restore`. */
  drop() {
    this.#abandon();
    this.#become("dropped");
  }

  restore() {
    if (this.state !== "dropped") return;
    this.#attempt = 0;
    this.#connect();
  }

  /** Cut the connection and come back at once. */
  restart() {
    if (this.state === "dropped") return;
    this.#retry();
  }

  send(frame) {
    if (this.#socket?.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(frame));
  }

  #connect() {
    this.#abandon();
    this.#become("connecting");
    const socket = new WebSocket(this.#url);
    this.#socket = socket;
    this.#watch();
    // A socket that was abandoned still reports its end: only the current one counts.
    const current = (handle) => (event) => {
      if (socket === this.#socket) handle(event);
    };
    socket.addEventListener("open", current(() => {
      this.#become("open");
      this.#handlers.onOpen();
    }));
    socket.addEventListener("message", current(({ data }) => {
      this.#watch();
      this.#attempt = 0;
      for (const frame of JSON.parse(data)) this.#handlers.onFrame(frame);
    }));
    socket.addEventListener("close", current(() => this.#retry()));
  }

  #retry() {
    this.#abandon();
    const wait = delay(this.#attempt);
    this.#attempt += 1;
    this.#timer = setTimeout(() => this.#connect(), wait);
    this.#become("waiting", wait);
  }

  #watch() {
    clearTimeout(this.#watchdog);
    this.#watchdog = setTimeout(() => this.#retry(), SILENCE);
  }

  #abandon() {
    clearTimeout(this.#timer);
    clearTimeout(this.#watchdog);
    const socket = this.#socket;
    this.#socket = null;
    socket?.close();
  }

  #become(state, wait = 0) {
    this.state = state;
    this.#handlers.onState(state, wait);
  }
}
