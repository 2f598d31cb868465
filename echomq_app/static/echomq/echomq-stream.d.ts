/** Types of echomq-stream.js, which defines `<echomq-stream>`. See docs/javascript.md. */

import type {
  Client,
  CursorExpired,
  EchoRecord,
  RecordsInfo,
  State,
  StateInfo,
  Subscription,
  SubscriptionError,
} from "./echomq.js";

export class EchoStream extends HTMLElement {
  /** A client to use instead of the page's shared one of `url`; set before it is added. */
  client?: Client | null;
  readonly subscription: Subscription | null;
}

/** A field of a record as text: `data.total`. */
export function fieldText(record: EchoRecord, path: string): string;

declare global {
  interface HTMLElementTagNameMap {
    "echomq-stream": EchoStream;
  }

  interface GlobalEventHandlersEventMap {
    "echomq:records": CustomEvent<RecordsInfo & { records: EchoRecord[] }>;
    "echomq:expired": CustomEvent<CursorExpired>;
    "echomq:state": CustomEvent<StateInfo & { state: State }>;
    "echomq:error": CustomEvent<SubscriptionError>;
  }
}
