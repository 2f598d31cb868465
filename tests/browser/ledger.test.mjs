import assert from "node:assert/strict";
import { test } from "node:test";

import * as book from "../../project/seismic/static/seismic/ledger.js";

const LATER = book.GRACE;

const following = (more = {}) => ({ epoch: "e1", first: 0, head: 0, ...more });

const page = (from, to, more = {}) => ({
  epoch: "e1",
  first: 0,
  head: to,
  cursor: to,
  token: `e1:${to}:x`,
  records: Array.from({ length: to - from }, (_, i) => ({ position: from + i })),
  ...more,
});

const heard = (position, epoch = "e1") => ({ epoch, position });

/** A page that was there from the first record on. */
const begun = () => book.onFollowing(book.newLedger(), following()).ledger;

const withRecords = (ledger, from, to, now = 0) => book.onRecords(ledger, page(from, to), now).ledger;

const withEvents = (ledger, from, to) => {
  for (let p = from; p < to; p += 1) ledger = book.onEvent(ledger, heard(p)).ledger;
  return ledger;
};

test("each connect asks for what comes after the last record", () => {
  assert.deepEqual(book.followRequest(book.newLedger()), { kind: "follow", token: null });
  const ledger = withRecords(begun(), 0, 3);
  assert.deepEqual(book.followRequest(ledger), { kind: "follow", token: "e1:3:x" });
});

test("records that came before are dropped, the rest is taken", () => {
  const ledger = withRecords(begun(), 0, 5);
  const { ledger: after, fresh, hole } = book.onRecords(ledger, page(3, 8), 0);
  assert.equal(hole, null);
  assert.deepEqual(fresh.map((record) => record.position), [5, 6, 7]);
  assert.equal(after.cursor, 8);
});

test("a whole page that came before changes nothing, not even the token", () => {
  const ledger = withRecords(begun(), 0, 5);
  const { ledger: after, fresh } = book.onRecords(ledger, page(1, 4), 0);
  assert.equal(after, ledger);
  assert.deepEqual(fresh, []);
});

test("a hole in the log is reported, and the token stays before it", () => {
  const ledger = withRecords(begun(), 0, 5);
  const { ledger: after, fresh, hole } = book.onRecords(ledger, page(7, 9), 0);
  assert.deepEqual(hole, [5, 7]);
  assert.deepEqual(fresh, []);
  assert.equal(after.token, "e1:5:x");
});

test("a page that claims more than it carries is a hole too", () => {
  const { hole } = book.onRecords(begun(), page(0, 3, { cursor: 5 }), 0);
  assert.deepEqual(hole, [3, 5]);
});

test("records of another life of the log are never mixed in", () => {
  const ledger = withRecords(begun(), 0, 5);
  const { ledger: after } = book.onRecords(ledger, page(5, 6, { epoch: "e2" }), 0);
  assert.equal(after, ledger);
});

test("resuming in the same life keeps everything", () => {
  const ledger = withEvents(withRecords(begun(), 0, 5), 0, 5);
  const { ledger: after, reset } = book.onFollowing(ledger, following({ head: 9 }));
  assert.equal(reset, false);
  assert.equal(after.cursor, 5);
  assert.equal(book.tally(after, 0).behind, 4);
});

test("what was there before the page came is history, not a loss", () => {
  const first = book.onFollowing(book.newLedger(), following({ head: 100 })).ledger;
  const ledger = withRecords(first, 0, 100);
  const sums = book.tally(ledger, LATER);
  assert.equal(sums.history, 100);
  assert.equal(sums.lostCount, 0);
});

test("a record whose event never came is lost after the grace, and not before", () => {
  const ledger = withEvents(withRecords(begun(), 0, 10, 1000), 0, 6);
  assert.equal(book.tally(ledger, 1000 + LATER - 1).lostCount, 0);
  assert.equal(book.tally(ledger, 1000 + LATER - 1).awaited, 4);
  const sums = book.tally(ledger, 1000 + LATER);
  assert.deepEqual(sums.lost, [[6, 10]]);
  assert.equal(sums.fed, 6);
});

test("an event that comes after all is no longer lost", () => {
  let ledger = withRecords(begun(), 0, 3);
  assert.equal(book.tally(ledger, LATER).lostCount, 3);
  ledger = withEvents(ledger, 0, 3);
  assert.equal(book.tally(ledger, LATER).lostCount, 0);
});

test("an event before its record counts once, and a repeat not at all", () => {
  const { ledger, fresh } = book.onEvent(begun(), heard(0));
  assert.equal(fresh, true);
  const again = book.onEvent(ledger, heard(0));
  assert.equal(again.fresh, false);
  assert.equal(book.tally(withRecords(again.ledger, 0, 1), LATER).fed, 1);
});

test("a cleared log begins anew, and its early events are kept", () => {
  let ledger = withRecords(begun(), 0, 50);
  ledger = book.onEvent(ledger, heard(0, "e2")).ledger;
  const answer = book.onFollowing(ledger, following({ epoch: "e2", head: 2 }));
  assert.equal(answer.reset, true);
  assert.deepEqual(answer.heard, [heard(0, "e2")]);
  const sums = book.tally(
    book.onRecords(answer.ledger, page(0, 2, { epoch: "e2" }), 0).ledger, LATER);
  assert.deepEqual(sums.lost, [[1, 2]]); // the feed was ours to hear all along
  assert.equal(sums.history, 0);
});

test("an empty log that gets its first record is no reset", () => {
  const empty = book.onFollowing(book.newLedger(), following({ epoch: "" })).ledger;
  const answer = book.onFollowing(empty, following({ head: 1 }));
  assert.equal(answer.reset, false);
  assert.equal(answer.ledger.baseline, 0);
});

test("a log that was cleared and is empty is a reset", () => {
  const ledger = withRecords(begun(), 0, 5);
  const answer = book.onFollowing(ledger, following({ epoch: "" }));
  assert.equal(answer.reset, true);
  assert.equal(book.followRequest(answer.ledger).token, null);
});

test("a refused token begins anew even under the same epoch", () => {
  const ledger = book.onInvalid(withRecords(begun(), 0, 5));
  assert.equal(book.followRequest(ledger).token, null);
  assert.equal(book.onFollowing(ledger, following({ head: 5 })).reset, true);
});

test("records that were trimmed away are skipped, said so, and not called lost by the feed", () => {
  let ledger = withEvents(withRecords(begun(), 0, 5), 0, 5);
  ledger = book.onExpired(ledger, { epoch: "e1", first: 8, head: 10 });
  assert.equal(ledger.cursor, 8);
  ledger = withEvents(withRecords(ledger, 8, 10), 8, 10);
  const sums = book.tally(ledger, LATER);
  assert.equal(sums.skipped, 3);
  assert.equal(sums.came, 7);
  assert.equal(sums.lostCount, 0);
});

test("the verdict on a break waits for an event from behind it", () => {
  let ledger = withEvents(withRecords(begun(), 0, 5), 0, 5);
  ledger = withRecords(ledger, 5, 12, 100);
  const gone = { from: 5, to: 9 };
  assert.equal(book.verdict(ledger, gone, 100 + LATER), null); // late is not lost
  const heardOn = withEvents(ledger, 9, 12);
  assert.equal(book.verdict(heardOn, gone, 100 + LATER - 1), null);
  assert.deepEqual(book.verdict(heardOn, gone, 100 + LATER), { caughtUp: 4, lost: 4 });
  // Nothing follows: the replay ended during the break.
  assert.deepEqual(book.verdict(ledger, gone, 100 + 4 * LATER), { caughtUp: 4, lost: 4 });
});

test("marks don't pile up over a long run", () => {
  let ledger = begun();
  for (let i = 0; i < 2000; i += 1) ledger = withRecords(ledger, i, i + 1, i * 100);
  assert.ok(ledger.marks.length <= LATER / 100 + 2, `${ledger.marks.length} marks`);
  assert.equal(book.tally(ledger, 2000 * 100 + LATER).lostCount, 2000);
});
