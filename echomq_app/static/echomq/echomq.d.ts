/** Types of echomq.js. What the callbacks may rely on is in docs/javascript.md. */

export interface EchoRecord<Data = unknown> {
  /** `EVT…`: the same wherever this record is seen. */
  readonly id: string;
  /** Its place in the stream: dense from 0 on, in each epoch. */
  readonly position: number;
  readonly type: string;
  readonly key: string;
  readonly data: Data;
  readonly headers: Readonly<Record<string, unknown>>;
  /** ISO 8601, with its offset. */
  readonly recorded_at: string;
}

export interface EchoEvent<Data = unknown> {
  readonly event: string;
  readonly job_id: string;
  readonly data: Data;
  /** Of this subscription, from 0 on. */
  readonly number: number;
}

export interface RecordsInfo {
  /** The next position that is still needed. */
  readonly cursor: number;
  /** The token of that cursor. */
  readonly resume: string;
  /** The next position that will be written: `head - cursor` is how far behind this is. */
  readonly head: number;
}

export interface SubscribedInfo extends RecordsInfo {
  readonly epoch: string;
  /** The oldest position that is retained. */
  readonly first: number;
  /** Whether everything from the place that was asked for follows. */
  readonly recovered: boolean;
}

export interface CursorExpired extends RecordsInfo {
  readonly reason: "trimmed" | "epoch" | "ahead" | "diverged" | "malformed";
  /** The cursor that was asked for, or `null` when that was no token. */
  readonly requested: number | null;
  readonly first: number;
  readonly epoch: string;
}

export interface SubscriptionError {
  readonly code: string;
  readonly message: string;
  /** Whether the subscription is over. Otherwise it is tried again, with the last token. */
  readonly final: boolean;
}

export interface StreamOptions<Data = unknown> {
  /** A token: of the page as it was rendered, or kept from a `Subscription.resume`. */
  resume?: string | null;
  /** Where to begin without a token: `"head"` (the default), `"first"`, or a cursor. */
  from?: "head" | "first" | number;
  /** Only records of these types. */
  types?: string | readonly string[];
  /** Only records with this key. */
  key?: string;
  /** Keep the token in session storage under this key. It goes before `resume`. */
  persist?: string;
  /** Records in order. The next ones wait for what it returns. */
  onRecords?(records: EchoRecord<Data>[], info: RecordsInfo): unknown;
  /** The same, one by one. */
  onRecord?(record: EchoRecord<Data>, info: RecordsInfo): unknown;
  /**
   * Records are lost to this page. Return `"first"` for all that is retained; otherwise it goes
   * on with what comes from now on.
   */
  onCursorExpired?(info: CursorExpired): unknown;
  onSubscribed?(info: SubscribedInfo): unknown;
  onError?(error: SubscriptionError): unknown;
}

export interface EventsOptions<Data = unknown> {
  onEvent?(event: EchoEvent<Data>): unknown;
  /** Events are missing here; `"reconnect"`: those while there was no connection. */
  onGap?(gap: { readonly reason: string }): unknown;
  onSubscribed?(info: Record<string, never>): unknown;
  onError?(error: SubscriptionError): unknown;
}

export interface Subscription<Data = unknown> extends AsyncIterable<EchoRecord<Data>> {
  /** The name of the stream or queue. */
  readonly name: string;
  /** The token of everything that the callbacks are done with. */
  readonly resume: string | undefined;
  readonly ended: boolean;
  unsubscribe(): void;
}

export interface EventsSubscription {
  readonly name: string;
  readonly ended: boolean;
  unsubscribe(): void;
}

export type State = "connecting" | "open" | "waiting" | "paused" | "closed";

export interface StateInfo {
  /** `waiting`: milliseconds until the next attempt. */
  readonly retryIn?: number;
  /** `closed`, unless by `close()`: the websocket's close code, 0 if it could not be made. */
  readonly code?: number;
  readonly reason?: string;
}

/** Times are in milliseconds. */
export interface Timing {
  /** The longest first wait, 500. */
  minDelay: number;
  /** The longest wait at all, 60,000. */
  maxDelay: number;
  /** To give an attempt up, 20,000. */
  connectTimeout: number;
  /** Silence after which the server is asked, 25,000. */
  pingInterval: number;
  /** How long it may take to answer, 10,000. */
  pingTimeout: number;
  /** How long the tab may be hidden before the connection is let go, 300,000. */
  pauseAfter: number;
}

export interface ConnectOptions extends Partial<Timing> {
  /** Called before each attempt. Nothing returned: the session cookie decides. */
  getToken?(): string | null | undefined | Promise<string | null | undefined>;
  /** Instead of the browser's `WebSocket`. */
  WebSocketImpl?: new (url: string, protocol: string) => WebSocketLike;
  /** Errors of no subscription. Default: `console.error`. */
  onError?(error: { readonly code: string; readonly message: string }): unknown;
}

/** What is used of a websocket. */
export interface WebSocketLike {
  onopen: ((event: any) => unknown) | null;
  onmessage: ((event: any) => unknown) | null;
  onclose: ((event: any) => unknown) | null;
  send(text: string): void;
  close(): void;
}

export interface Client {
  readonly state: State;
  stream<Data = unknown>(name: string, options?: StreamOptions<Data>): Subscription<Data>;
  events<Data = unknown>(queue: string, options?: EventsOptions<Data>): EventsSubscription;
  /** Calls the listener at once and at each change. Returns a function that stops it. */
  onState(listener: (state: State, info: StateInfo) => unknown): () => void;
  /** For good: all subscriptions end. */
  close(): void;
}

/** Connects at once, and again whenever it has to. Default: this site's `/ws/echomq/`. */
export function connect(url?: string | URL, options?: ConnectOptions): Client;

export const DEFAULTS: Readonly<Timing>;

// The rules, for those who test or write another client

/** Milliseconds to wait before an attempt, the first being 0. */
export function delay(
  attempt: number,
  limits?: Pick<Timing, "minDelay" | "maxDelay">,
  random?: () => number,
): number;

export function sift<R extends { position: number }>(
  cursor: number,
  frame: { since: number; records: R[] },
): { fresh: R[]; hole: boolean };

export function isFatal(code: number, hasGetToken: boolean): boolean;
