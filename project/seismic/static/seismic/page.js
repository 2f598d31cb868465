/** The page: one websocket, one ledger, two lists, a map. */

import { Connection } from "./connection.js";
import { Controls } from "./controls.js";
import { count, plural } from "./format.js";
import * as book from "./ledger.js";
import { QuakeList } from "./lists.js";
import { QuakeMap } from "./map.js";
import * as ranges from "./ranges.js";

const PAINT = 120; // milliseconds between two changes of the page
const STORY_MAX = 12;

const page = document.querySelector("main");
const part = (id) => document.getElementById(id);
const feedList = new QuakeList(part("feed-list"));
const logList = new QuakeList(part("log-list"));
const map = new QuakeMap(part("map"));
const controls = new Controls(page, say);

let ledger = book.newLedger();
let toFeed = []; // waiting to be painted
let toLog = [];
let shownLost = [];
let brokenOff = null; // {since, cursor}: the connection is gone
let breaks = []; // {from, to}: over, until the verdict is known
let painting = 0;

const connection = new Connection(
  `${location.protocol === "https:" ? "wss" : "ws"}://${location.host}${page.dataset.websocket}`,
  { onOpen: () => connection.send(book.followRequest(ledger)), onFrame, onState },
);

part("drop").addEventListener("change", ({ target }) => {
  if (target.checked) connection.drop();
  else connection.restore();
});
for (const button of document.querySelectorAll("input[name=view]")) {
  button.addEventListener("change", () => map.show(button.value));
}

function onFrame(frame) {
  switch (frame.kind) {
    case "hello":
      part("no-broker").hidden = frame.broker;
      break;
    case "following":
      following(frame);
      break;
    case "records":
      connection.send({ kind: "ack" });
      records(frame);
      break;
    case "event":
      event(frame);
      break;
    case "gap":
      say(`The feed has a gap: ${frame.why}. What it lost is counted below.`);
      break;
    case "cursor_expired":
      ledger = book.onExpired(ledger, frame);
      say(`${plural(frame.missed, "record")} left the log before this page had read them.`);
      break;
    case "cursor_invalid":
      ledger = book.onInvalid(ledger);
      say(`The log refused to resume here (${frame.reason}): this page begins anew.`);
      break;
    case "error":
      say(frame.message);
      break;
  }
  paintSoon();
}

function following(frame) {
  const before = ledger;
  const { ledger: after, reset, heard } = book.onFollowing(ledger, frame);
  ledger = after;
  if (reset) {
    forget();
    say(`The log was cleared: a new life of it began (epoch ${frame.epoch || "not yet known"}).`);
  }
  toFeed.push(...heard);
  if (brokenOff && before.epoch !== null) {
    const seconds = ((performance.now() - brokenOff.since) / 1000).toFixed(1);
    const from = reset ? frame.first : brokenOff.cursor;
    const missed = Math.max(0, frame.head - from);
    say(`Back after ${seconds} s. ${plural(missed, "record")} came meanwhile: the log hands them over, the feed can't.`);
    if (missed) breaks.push({ from, to: frame.head });
  }
  brokenOff = null;
}

function records(frame) {
  const { ledger: after, fresh, hole } = book.onRecords(ledger, frame, performance.now());
  if (hole) {
    // Never skipped: the token is still the old one, so the log is asked again.
    say(`The log left out positions ${hole[0]} to ${hole[1] - 1}. Asking again.`);
    connection.restart();
    return;
  }
  ledger = after;
  toLog.push(...fresh);
}

function event({ event: name, job_id: jobId, data }) {
  if (name === page.dataset.quake) {
    const { ledger: after, fresh } = book.onEvent(ledger, data);
    ledger = after;
    if (fresh) toFeed.push(data);
  } else if (name === "progress") {
    controls.progress(jobId, data.fraction, data.note);
  } else {
    controls.look();
  }
}

function onState(state, wait) {
  if ((state === "dropped" || state === "waiting") && !brokenOff) {
    brokenOff = { since: performance.now(), cursor: ledger.cursor };
    const who = state === "dropped" ? "You dropped the connection" : "The connection broke";
    say(`${who} at position ${count(ledger.cursor)} of the log.`);
  }
  const texts = {
    connecting: "connecting",
    open: "connected",
    waiting: `gone, next attempt in ${(wait / 1000).toFixed(1)} s`,
    dropped: "dropped by you",
  };
  const pill = part("connection");
  pill.textContent = texts[state];
  pill.dataset.state = state;
}

function forget() {
  toFeed = [];
  toLog = [];
  shownLost = [];
  breaks = [];
  feedList.clear();
  logList.clear();
  map.clear();
}

function paintSoon() {
  painting ||= setTimeout(paint, PAINT);
}

function paint() {
  painting = 0;
  feedList.add(toFeed);
  logList.add(toLog.map(({ position, data }) => ({ position, quake: data })));
  map.add(toLog, { quiet: toLog.length > 50 });
  toFeed = [];
  toLog = [];
  const now = performance.now();
  const sums = book.tally(ledger, now);
  showLost(sums.lost);
  feedList.showGaps(sums.lost);
  part("feed-came").textContent = count(sums.fed);
  part("feed-lost").textContent = count(sums.lostCount);
  part("feed-history").textContent = count(sums.history);
  part("log-came").textContent = count(sums.came);
  part("log-missing").textContent = count(sums.skipped);
  part("log-behind").textContent = count(sums.behind);
  part("epoch").textContent = ledger.epoch || "none yet";
  part("feed-column").classList.toggle("loses", sums.lostCount > 0);
  giveVerdicts(now);
  if (sums.awaited || breaks.length) paintSoon();
}

function showLost(lost) {
  const toggle = (list, value) => {
    for (const [from, to] of list) {
      for (let position = from; position < to; position += 1) {
        logList.setLost(position, value);
        map.setLost(position, value);
      }
    }
  };
  toggle(ranges.without(lost, shownLost), true);
  toggle(ranges.without(shownLost, lost), false);
  shownLost = lost;
}

function giveVerdicts(now) {
  breaks = breaks.filter((range) => {
    const verdict = book.verdict(ledger, range, now);
    if (!verdict) return true;
    say(`That break: the log lost nothing (${plural(verdict.caughtUp, "record")} caught up), the feed lost ${count(verdict.lost)} for good.`);
    return false;
  });
}

/** Add a line to the story; a screen reader hears it. */
function say(text) {
  const line = document.createElement("li");
  line.textContent = text;
  const story = part("story");
  story.append(line);
  while (story.children.length > STORY_MAX) story.firstElementChild.remove();
  story.scrollTop = story.scrollHeight;
}
