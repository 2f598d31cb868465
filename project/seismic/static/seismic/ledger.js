/**
 * What this page has of the log, what it has of the feed, and so what the feed lost.
 *
 * Pure: each function takes a ledger and returns a new one; time is an argument.
 * The rules:
 * - The log is read from a resume token. A position below `cursor` was here before and
 *   is dropped; one above it would be a hole, which the log promises not to have, so it
 *   is reported as an error and never passed over.
 * - The feed promises nothing. A record that the log delivered, and whose event has not
 *   come `GRACE` later, counts as lost; if it comes after all, it no longer does.
 * - What was in the log before this page came is history. The feed never had it for us.
 */

import * as ranges from "./ranges.js";

/** Milliseconds that an event may be later than its record before it counts as lost. */
export const GRACE = 1500;

/** Events of a life of the log that this page has not heard of yet; more are forgotten. */
const EARLY_MAX = 500;

export function newLedger() {
  return {
    epoch: null, // which life of the log, null before the first answer
    token: null, // where to resume, null = from the oldest record
    cursor: 0, // the next position needed
    start: 0, // where this page's reading began
    first: 0, // the oldest position that the log still has
    head: 0, // the next position that will be written
    baseline: 0, // below it is history
    skipped: [], // ranges that were trimmed away before this page could read them
    stale: false, // the log refused our token: the next answer begins anew
    fed: [], // ranges of positions that came over the feed
    marks: [], // [time, cursor]: when the log had delivered how much
    early: [], // events of another epoch, kept until the log tells of it
  };
}

/** What to ask for after each connect: the log goes on where it ended. */
export function followRequest(ledger) {
  return { kind: "follow", token: ledger.token };
}

/**
 * The server's answer to a follow: where it begins, and in which life of the log.
 * `reset` is true when the page has to forget its lists: that life of the log is over.
 * `heard` are the events of this life that came before the answer.
 */
export function onFollowing(ledger, frame) {
  const { epoch, first, head } = frame;
  const known = Boolean(ledger.epoch);
  const reset = known && (ledger.stale || ledger.epoch !== epoch);
  if (known && !reset) return { ledger: { ...ledger, first, head }, reset, heard: [] };
  // At the first answer the past is history. Of a log that began while this page was
  // there (it was empty, or was cleared), every event was ours to hear.
  const baseline = ledger.epoch === null ? head : first;
  const heard = ledger.early.filter((event) => event.epoch === epoch);
  const early = ledger.early.filter((event) => event.epoch !== epoch);
  const fed = heard.reduce((set, event) => ranges.add(set, event.position), []);
  const next = { ...newLedger(), epoch, first, head, baseline, fed, early };
  next.start = next.cursor = first;
  return { ledger: next, reset, heard };
}

/**
 * A page of the log. `fresh` is what was not here before; `hole` is null, or what is
 * missing, [from, to), and then nothing of the page is taken.
 */
export function onRecords(ledger, frame, now) {
  const nothing = { ledger, fresh: [], hole: null };
  if (ledger.epoch !== frame.epoch || frame.cursor < ledger.cursor) return nothing;
  const fresh = frame.records.filter((record) => record.position >= ledger.cursor);
  let expected = ledger.cursor;
  for (const { position } of fresh) {
    if (position !== expected) return { ...nothing, hole: [expected, position] };
    expected += 1;
  }
  if (frame.cursor !== expected) return { ...nothing, hole: [expected, frame.cursor] };
  const { token, cursor, first, head } = frame;
  const marks = [...withoutOld(ledger.marks, now), [now, cursor]];
  return { ledger: { ...ledger, token, cursor, first, head, marks }, fresh, hole: null };
}

/** An event of the feed that announces a record. `fresh` is false for a repeat. */
export function onEvent(ledger, event) {
  if (event.epoch !== ledger.epoch) {
    const early = [...ledger.early, event].slice(-EARLY_MAX);
    return { ledger: { ...ledger, early }, fresh: false };
  }
  const fed = ranges.add(ledger.fed, event.position);
  return { ledger: { ...ledger, fed }, fresh: fed !== ledger.fed };
}

/** The log no longer has what this page needs next: it goes on at `first`, and says so. */
export function onExpired(ledger, { first, head, epoch }) {
  if (ledger.epoch !== epoch || first <= ledger.cursor) return ledger;
  const skipped = [...ledger.skipped, [ledger.cursor, first]];
  return { ...ledger, token: null, cursor: first, first, head, skipped };
}

/** The log refused the token: an earlier life, or a history that was replaced. */
export function onInvalid(ledger) {
  return { ...ledger, token: null, stale: true };
}

/** The sums that the page shows. `lost` and `awaited` are ranges of positions. */
export function tally(ledger, now) {
  const settled = settledCursor(ledger.marks, now);
  const missing = ranges.holes(ledger.fed, ledger.baseline, settled);
  const lost = ranges.without(missing, ledger.skipped);
  const awaited = ranges.holes(ledger.fed, Math.max(ledger.baseline, settled), ledger.cursor);
  return {
    history: ledger.baseline - Math.min(ledger.start, ledger.baseline),
    came: ledger.cursor - ledger.start - ranges.count(ledger.skipped),
    skipped: ranges.count(ledger.skipped),
    behind: Math.max(0, ledger.head - ledger.cursor),
    fed: ranges.count(ledger.fed),
    lost,
    lostCount: ranges.count(lost),
    awaited: ranges.count(awaited),
  };
}

/** What the log had delivered `GRACE` ago: every event of it has had its time. */
function settledCursor(marks, now) {
  let settled = 0;
  for (const [time, cursor] of marks) if (time <= now - GRACE) settled = cursor;
  return settled;
}

/** Marks that still matter: the newest settled one, and all after it. */
function withoutOld(marks, now) {
  const settled = marks.findLastIndex(([time]) => time <= now - GRACE);
  return settled > 0 ? marks.slice(settled) : marks;
}

/**
 * What a break of the connection did to positions [from, to), or null as long as an
 * event may still come. The feed keeps its order, so an event from behind the break
 * settles it; if there is none, some patience does.
 */
export function verdict(ledger, { from, to }, now) {
  const patience = ranges.end(ledger.fed) > to ? 0 : 3 * GRACE;
  if (settledCursor(ledger.marks, now - patience) < to) return null;
  const lost = ranges.holes(ledger.fed, Math.max(from, ledger.baseline), to);
  return { caughtUp: to - from, lost: ranges.count(lost) };
}
