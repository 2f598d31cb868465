/**
 * The client against a server that keeps the protocol and nothing else: seeded cuts at any
 * point, refused connections, sleep, hidden tabs, trims, new epochs, slow and throwing handlers.
 * At the end each record came once and in order, or a `cursor_expired` stands in its place.
 *
 * `ECHOMQ_SEEDS=100-2000 node --test …` tries others.
 */

import assert from "node:assert/strict";
import { test } from "node:test";

import { WELCOME, expired, records, stage, subscribed } from "./echomq_fake.mjs";

const [FIRST, LAST] = (process.env.ECHOMQ_SEEDS ?? "0-20").split("-").map(Number);
const STEPS = 150;
const WINDOW = 500;

/** A small generator of random numbers that gives the same for the same seed (mulberry32). */
function seeded(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

class Server {
  epoch = 1;
  first = 0;
  head = 0;
  subs = new Map();
  socket = null;

  constructor(random) {
    this.random = random;
  }

  upTo(n) {
    return Math.floor(this.random() * n);
  }

  token(cursor) {
    return `${this.epoch}:${cursor}:`;
  }

  rotate() {
    Object.assign(this, { epoch: this.epoch + 1, first: 0, head: 0 });
    for (const sub of this.subs.values()) sub.stale = true;
  }

  accept(socket) {
    this.socket = socket;
    this.subs.clear();
    socket.onsend = (frames) => frames.forEach((frame) => this.receive(frame));
    socket.accept();
    socket.say(WELCOME);
  }

  receive(frame) {
    if (frame.type === "subscribe") {
      assert.ok(!this.subs.has(frame.sub), "a number is used twice");
      this.subs.set(frame.sub, { ask: frame, acked: 0, sent: 0, times: [] });
    } else if (frame.type === "unsubscribe") {
      assert.ok(this.subs.delete(frame.sub));
    } else if (frame.type === "ack") {
      const sub = this.subs.get(frame.sub);
      assert.ok(sub, "an ack for nothing");
      assert.ok(frame.cursor <= sub.highest, "acknowledged before it was sent");
      sub.acked = sub.times.find(([cursor]) => cursor === frame.cursor)?.[1] ?? sub.acked;
    }
  }

  /** Send the next frame of each subscription, or only some of it. */
  deliver() {
    for (const [number, sub] of [...this.subs]) {
      if (this.socket?.readyState !== 1) return;
      if (sub.cursor === undefined) this.begin(number, sub);
      else if (sub.stale || sub.cursor < this.first) this.expire(number, sub, sub.cursor);
      else this.records(number, sub);
    }
  }

  begin(number, sub) {
    const [epoch, text] = (sub.ask.resume ?? "").split(":");
    const asked = sub.ask.resume ? Number(text) : this.head;
    const there = !sub.ask.resume || Number(epoch) === this.epoch;
    sub.cursor = asked;
    sub.highest = asked;
    const recovered = there && asked >= this.first;
    const cursor = recovered ? asked : this.head;
    this.say(subscribed(number, cursor, {
      epoch: `${this.epoch}`, first: this.first, head: this.head, recovered,
      resume: this.token(cursor),
    }));
    // A cut between these two is the trap: the token of `subscribed` would hide the loss.
    if (!recovered) sub.stale = true;
  }

  expire(number, sub, requested) {
    Object.assign(sub, { cursor: this.head, highest: this.head, stale: false, times: [] });
    sub.acked = sub.sent;
    this.say(expired(number, requested, this.head, {
      epoch: `${this.epoch}`, first: this.first, resume: this.token(this.head),
    }));
  }

  records(number, sub) {
    const room = WINDOW - (sub.sent - sub.acked);
    const to = Math.min(this.head, sub.cursor + Math.min(room, 1 + this.upTo(120)));
    if (to <= sub.cursor) return;
    const frame = records(number, sub.cursor, to, { resume: this.token(to), head: this.head });
    for (const record of frame.records) record.epoch = `${this.epoch}`;
    sub.sent += to - sub.cursor;
    sub.cursor = sub.highest = to;
    sub.times.push([to, sub.sent]);
    this.say(frame);
  }

  say(frame) {
    this.socket.say(frame);
  }
}

/** The journal of a page, checked: what came, or was told to be lost, without a hole. */
function check(journal, server) {
  let place = null;
  let lost = 0;
  for (const [what, info] of journal) {
    if (what === "subscribed") {
      if (info.recovered) place ??= { epoch: info.epoch, cursor: info.cursor };
    } else if (what === "expired") {
      assert.ok(info.requested <= place.cursor || info.epoch !== place.epoch);
      place = { epoch: info.epoch, cursor: info.cursor };
      lost += 1;
    } else {
      assert.deepEqual(info, { epoch: place.epoch, position: place.cursor });
      place.cursor += 1;
    }
  }
  assert.deepEqual(place, { epoch: `${server.epoch}`, cursor: server.head });
  return lost;
}

async function run(t, seed, { mayLose }) {
  const s = stage(t);
  t.mock.method(console, "error", () => {});
  const random = seeded(seed);
  t.mock.method(Math, "random", random);
  const server = new Server(random);
  server.head = server.upTo(50);
  const journal = [];
  const client = s.connect();
  const step = () => new Promise((resolve) => setTimeout(resolve, random() * 300));
  const subscription = client.stream("orders", {
    onSubscribed: (info) => journal.push(["subscribed", info]),
    onCursorExpired: (info) => void journal.push(["expired", info]),
    onRecord: async ({ epoch, position }) => {
      journal.push(["record", { epoch, position }]);
      if (random() < 0.02) await step();
      if (random() < 0.02) throw new Error("a page with a fault");
    },
  });
  let refused = false;

  const meet = () => {
    const { socket } = s;
    if (!socket || socket.readyState !== 0 || refused) return;
    server.accept(socket);
  };
  const actions = [
    [30, () => (server.head += server.upTo(150))],
    [30, () => server.deliver()],
    [5, () => s.socket?.readyState === 1 && s.socket.die([1006, 1012, 1011][server.upTo(3)])],
    [2, () => (refused = true)],
    [3, async () => { refused = false; await s.fire("online"); }],
    [2, () => s.socket?.readyState === 0 && s.socket.die()],
    [2, () => s.sleep(server.upTo(100_000))],
    [1, () => s.hide()],
    [2, () => s.show()],
    [2, () => (server.socket = null)], // half open: it says nothing more
    [1, () => server.subs.forEach((_, sub) => {
      if (!server.socket || server.subs.get(sub).cursor === undefined) return;
      server.subs.delete(sub);
      server.say({ type: "error", code: "failed", message: "a fault", sub });
    })],
    [mayLose ? 2 : 0, () => (server.first = server.first + server.upTo(server.head - server.first))],
    [mayLose ? 0.5 : 0, () => server.rotate()],
  ];
  const weight = actions.reduce((sum, [w]) => sum + w, 0);
  // The page's first look at the stream is what all later promises are about.
  while (journal.length === 0) {
    await s.pass(50);
    meet();
    server.deliver();
  }
  for (let i = 0; i < STEPS; i += 1) {
    let pick = random() * weight;
    await actions.find(([w]) => (pick -= w) < 0)[1]();
    await s.pass(random() < 0.1 ? 1000 : 50);
    meet();
  }
  refused = false;
  await s.show();
  await s.fire("online");
  for (let i = 0; i < 400; i += 1) {
    await s.pass(250);
    meet();
    server.deliver();
    if (subscription.resume === server.token(server.head)) break;
  }
  client.close();
  return { lost: check(journal, server), records: journal.length, sockets: s.sockets };
}

test("cut off at random, each record comes once and in order", async (t) => {
  let sockets = 0;
  for (let seed = FIRST; seed < LAST; seed += 1) {
    await t.test(`seed ${seed}`, async (t) => {
      const told = await run(t, seed, { mayLose: false });
      assert.equal(told.lost, 0);
      sockets += told.sockets;
    });
  }
  assert.ok(sockets > 4 * (LAST - FIRST), "it was cut off often");
});

test("with trims and new epochs, what doesn't come is told, and every later one comes", async (t) => {
  let lost = 0;
  for (let seed = FIRST; seed < LAST; seed += 1) {
    await t.test(`seed ${seed}`, async (t) => {
      lost += (await run(t, seed, { mayLose: true })).lost;
    });
  }
  assert.ok(lost > 0, "something was lost");
});
