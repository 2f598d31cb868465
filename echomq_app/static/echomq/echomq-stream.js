/**
 * <echomq-stream name="orders" resume="…">: the records of a stream as DOM events, and as rows by
 * its <template>. How to use it: docs/javascript.md.
 */

import { connect } from "./echomq.js";

/** By url: the elements of a page share a socket. */
const clients = new Map();

function borrow(url) {
  let entry = clients.get(url);
  if (!entry || entry.client.state === "closed") entry = { client: connect(url), users: 0 };
  clients.set(url, entry);
  entry.users += 1;
  const giveBack = () => {
    entry.users -= 1;
    if (entry.users > 0) return;
    if (clients.get(url) === entry) clients.delete(url);
    entry.client.close();
  };
  return [entry.client, giveBack];
}

/** `data.total` of a record, as text. */
export function fieldText(record, path) {
  const value = path.split(".").reduce((part, name) => part?.[name], record);
  if (value === undefined || value === null) return "";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

export class EchoStream extends (globalThis.HTMLElement ?? class {}) {
  static observedAttributes = ["name", "url", "types", "key"];
  // `client` may be set from outside, also before this class is there, so it is no field.
  #running = null;
  #place = {}; // where the last subscription ended
  #rows = []; // of this element's making, oldest first
  #due = false;

  get subscription() {
    return this.#running?.subscription ?? null;
  }

  connectedCallback() {
    this.#schedule();
  }

  disconnectedCallback() {
    this.#schedule();
  }

  attributeChangedCallback() {
    this.#schedule();
  }

  // Once for many changes; and an element that is only moved keeps its subscription.
  #schedule() {
    if (this.#due) return;
    this.#due = true;
    queueMicrotask(() => {
      this.#due = false;
      this.#sync();
    });
  }

  #sync() {
    const wanted = this.isConnected && this.hasAttribute("name") ? this.#wanted() : null;
    const id = wanted && JSON.stringify(wanted);
    if (id === (this.#running?.id ?? null)) return;
    this.#running?.stop();
    this.#running = wanted && this.#start(wanted, id);
  }

  #wanted() {
    const [name, url, types, key] = EchoStream.observedAttributes.map((a) => this.getAttribute(a));
    return { name, url: url ?? undefined, types: types?.split(",").map((t) => t.trim()), key };
  }

  #start({ name, url, types, key }, id) {
    const [client, giveBack] = this.client ? [this.client, () => {}] : borrow(url);
    const from = this.getAttribute("from") ?? undefined;
    const subscription = client.stream(name, {
      types,
      key: key ?? undefined,
      resume: this.#place.name === name ? this.#place.resume : this.getAttribute("resume"),
      from: /^\d+$/.test(from) ? Number(from) : from,
      persist: this.getAttribute("persist") ?? undefined,
      onRecords: (records, info) => {
        this.#render(records);
        this.#tell("records", { records, ...info });
      },
      onCursorExpired: (info) => this.#tell("expired", info) || "first",
      onError: (error) => this.#tell("error", error),
    });
    const unlisten = client.onState((state, info) => {
      this.setAttribute("state", state);
      this.#tell("state", { state, ...info });
    });
    const stop = () => {
      unlisten();
      this.removeAttribute("state");
      const { resume } = subscription;
      if (resume) this.#place = { name, resume };
      subscription.unsubscribe();
      giveBack();
    };
    return { id, subscription, stop };
  }

  /** Dispatch an event; `false` when somebody prevented its default. */
  #tell(what, detail) {
    const options = { detail, bubbles: true, cancelable: what === "expired" };
    return this.dispatchEvent(new CustomEvent(`echomq:${what}`, options));
  }

  #render(records) {
    const template = this.querySelector("template");
    if (!template) return;
    const limit = Number(this.getAttribute("limit") ?? 200);
    const fresh = records.slice(-limit).map((record) => {
      const row = document.importNode(template.content, true);
      for (const slot of row.querySelectorAll("[data-field]")) {
        slot.textContent = fieldText(record, slot.dataset.field);
      }
      return [...row.childNodes];
    });
    (this.querySelector("[data-records]") ?? this).append(...fresh.flat());
    this.#rows.push(...fresh);
    const surplus = this.#rows.splice(0, Math.max(0, this.#rows.length - limit));
    surplus.flat().forEach((node) => node.remove());
  }
}

if (globalThis.customElements && !customElements.get("echomq-stream")) {
  customElements.define("echomq-stream", EchoStream);
}
