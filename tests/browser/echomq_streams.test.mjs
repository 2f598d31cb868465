import assert from "node:assert/strict";
import { test } from "node:test";

import { sift } from "../../echomq_app/static/echomq/echomq.js";
import { expired, gate, record, records, settle, stage, subscribed } from "./echomq_fake.mjs";

/** A subscription that writes down what its handlers were called with. */
function listen(client, name = "orders", options = {}) {
  const heard = { positions: [], batches: [], expired: [], errors: [], subscribed: [] };
  const subscription = client.stream(name, {
    onRecords: (batch, info) => {
      heard.batches.push(info);
      heard.positions.push(...batch.map(({ position }) => position));
    },
    onCursorExpired: (info) => void heard.expired.push(info),
    onError: (error) => heard.errors.push(error),
    onSubscribed: (info) => heard.subscribed.push(info),
    ...options,
  });
  return { subscription, heard };
}

const range = (from, to) => Array.from({ length: to - from }, (_, i) => from + i);

async function cut(s) {
  s.socket.die();
  await s.pass(60_000 + 50);
  return s.accept();
}

test("sift: what was here before is dropped, what is missing is noticed", () => {
  const positions = ({ fresh }) => fresh.map(({ position }) => position);
  const frame = (from, to, more) => records(1, from, to, more);
  assert.deepEqual(positions(sift(5, frame(3, 8))), [5, 6, 7]);
  assert.equal(sift(5, frame(3, 8)).hole, false);
  assert.deepEqual(sift(5, frame(1, 4)), { fresh: [], hole: false });
  assert.equal(sift(5, frame(6, 8)).hole, true);
  // What the server has left out is between `since` and `cursor`.
  assert.equal(sift(5, frame(6, 8, { since: 5, cursor: 10 })).hole, false);
  assert.equal(sift(5, { since: 5, records: [], cursor: 6 }).hole, false);
  assert.equal(sift(5, { since: 6, records: [], cursor: 7 }).hole, true);
});

test("one socket carries them all, under numbers of their own", async (t) => {
  const s = stage(t);
  const client = s.connect();
  listen(client, "orders", { resume: "e1:4:x", types: ["placed"], key: "7" });
  listen(client, "parcels", { from: "first" });
  client.events("emails");
  await s.accept();
  assert.deepEqual(s.socket.sent, [
    { type: "subscribe", sub: 1, stream: "orders", resume: "e1:4:x", types: ["placed"], key: "7" },
    { type: "subscribe", sub: 2, stream: "parcels", from: "first" },
    { type: "subscribe", sub: 3, events: "emails" },
  ]);
  const late = listen(client, "late");
  assert.deepEqual(s.socket.sent.at(-1), { type: "subscribe", sub: 4, stream: "late" });
  s.socket.say(subscribed(4, 9));
  s.socket.say(records(4, 9, 11), records(2, 0, 1));
  await settle();
  assert.deepEqual(late.heard.positions, [9, 10]);
  assert.deepEqual(late.heard.batches, [{ cursor: 11, resume: "e1:11:x", head: 11 }]);
});

test("no number is used twice on a socket", async (t) => {
  const s = stage(t);
  const client = await s.open();
  for (let i = 0; i < 3; i += 1) listen(client).subscription.unsubscribe();
  assert.deepEqual(s.socket.of("subscribe").map(({ sub }) => sub), [1, 2, 3]);
  assert.deepEqual(s.socket.of("unsubscribe").map(({ sub }) => sub), [1, 2, 3]);
});

test("after unsubscribe nothing more is heard, and nothing acknowledged", async (t) => {
  const s = stage(t);
  const client = await s.open();
  const { subscription, heard } = listen(client);
  s.socket.say(subscribed(1, 0), records(1, 0, 300));
  subscription.unsubscribe();
  subscription.unsubscribe();
  s.socket.say(records(1, 300, 301), { type: "unsubscribed", sub: 1 });
  s.socket.say({ type: "error", code: "unknown_sub", message: "it had ended" });
  await s.pass(1000);
  assert.deepEqual([...heard.errors, ...s.errors], []);
  assert.ok(heard.positions.length <= 300);
  assert.ok(s.socket.of("ack").length <= 1);
  assert.equal(s.socket.of("unsubscribe").length, 1);
});

test("an empty token, a list of one type, and a token that is too long", async (t) => {
  const s = stage(t);
  const client = await s.open();
  listen(client, "a", { resume: "", from: 5, types: "placed" });
  listen(client, "b", { resume: "x".repeat(1000) });
  const [a, b] = s.socket.sent;
  assert.deepEqual(a, { type: "subscribe", sub: 1, stream: "a", from: 5, types: ["placed"] });
  assert.equal(b.resume.length, 255);
  assert.throws(() => client.stream(""), TypeError);
  assert.throws(() => client.stream(null), TypeError);
});

// Resume

test("each connection goes on at the last token", async (t) => {
  const s = stage(t);
  const client = await s.open();
  const { subscription, heard } = listen(client);
  s.socket.say(subscribed(1, 0), records(1, 0, 3));
  await settle();
  assert.equal(subscription.resume, "e1:3:x");
  await cut(s);
  assert.deepEqual(s.socket.sent, [
    { type: "subscribe", sub: 2, stream: "orders", resume: "e1:3:x" },
  ]);
  s.socket.say(subscribed(2, 3), records(2, 3, 5));
  await settle();
  assert.deepEqual(heard.positions, range(0, 5));
});

test("subscribed before any record exists, dropped, three appended: all three arrive", async (t) => {
  const s = stage(t);
  const client = await s.open();
  const { heard } = listen(client);
  s.socket.say(subscribed(1, 0));
  await cut(s);
  assert.equal(s.socket.sent[0].resume, "e1:0:");
  s.socket.say(subscribed(2, 0), records(2, 0, 3));
  await settle();
  assert.deepEqual(heard.positions, [0, 1, 2]);
});

test("dropped before it was subscribed: the same request again", async (t) => {
  const s = stage(t);
  const client = await s.open();
  listen(client, "orders", { from: "first" });
  await cut(s);
  assert.equal(s.socket.sent[0].from, "first");
});

test("a frame without records moves the token", async (t) => {
  const s = stage(t);
  const client = await s.open();
  const { subscription, heard } = listen(client, "orders", { types: ["placed"] });
  s.socket.say(subscribed(1, 0), records(1, 0, 0, { cursor: 40, resume: "e1:40:x" }));
  await s.pass(150);
  assert.deepEqual(heard.batches, []);
  assert.equal(subscription.resume, "e1:40:x");
  assert.deepEqual(s.socket.of("ack"), [{ type: "ack", sub: 1, cursor: 40 }]);
});

test("a loss that was announced is told before anything that follows it", async (t) => {
  const s = stage(t);
  const client = await s.open();
  const { subscription, heard } = listen(client, "orders", { resume: "e1:5:x" });
  s.socket.say(subscribed(1, 120, { recovered: false }), expired(1, 5, 120));
  s.socket.say(records(1, 120, 122));
  await settle();
  assert.equal(heard.subscribed[0].recovered, false);
  const { reason, requested, first, head } = heard.expired[0];
  assert.deepEqual([reason, requested, first, head], ["trimmed", 5, 119, 120]);
  assert.deepEqual(heard.positions, [120, 121]);
  assert.equal(subscription.resume, "e1:122:x");
});

test("the notice of a loss is acknowledged as what it stands for", async (t) => {
  const s = stage(t);
  const client = await s.open();
  listen(client, "orders", { resume: "e1:5:x" });
  s.socket.say(subscribed(1, 120, { recovered: false }), expired(1, 5, 120));
  await s.pass(150);
  assert.deepEqual(s.socket.of("ack"), [{ type: "ack", sub: 1, cursor: 120 }]);
});

test("a server that goes back further than it was asked is heard from the right place", async (t) => {
  for (const [epoch, expected] of [["e1", [0, 1, 2, 3, 4]], ["e2", [0, 1, 2, 1, 2, 3, 4]]]) {
    const s = stage(t);
    const client = await s.open();
    const { heard } = listen(client);
    s.socket.say(subscribed(1, 0), records(1, 0, 3));
    await settle();
    await cut(s);
    s.socket.say(subscribed(2, 1, { epoch }), records(2, 1, 5));
    await settle();
    assert.deepEqual(heard.positions, expected);
    t.mock.timers.reset();
  }
});

test("cut between `subscribed` and `cursor_expired`, the old token is asked again", async (t) => {
  const s = stage(t);
  const client = await s.open();
  const { subscription } = listen(client, "orders", { resume: "e1:5:x" });
  s.socket.say(subscribed(1, 120, { recovered: false, resume: "e1:120:" }));
  await settle();
  assert.equal(subscription.resume, "e1:5:x");
  await cut(s);
  assert.equal(s.socket.sent[0].resume, "e1:5:x");
});

test("in a new epoch the old positions mean nothing", async (t) => {
  const s = stage(t);
  const client = await s.open();
  const { heard } = listen(client);
  s.socket.say(subscribed(1, 50), records(1, 50, 52));
  s.socket.say(expired(1, 52, 0, { epoch: "e2", reason: "epoch", resume: "e2:0:" }));
  s.socket.say(records(1, 0, 2, { resume: "e2:2:x" }));
  await settle();
  assert.deepEqual(heard.positions, [50, 51, 0, 1]);
  await s.pass(100);
  assert.deepEqual(s.socket.of("ack"), [{ type: "ack", sub: 1, cursor: 2 }], "52 was another life's");
  await cut(s);
  assert.equal(s.socket.sent[0].resume, "e2:2:x");
});

test('onCursorExpired may answer "first": all that is retained', async (t) => {
  const s = stage(t);
  const client = await s.open();
  const { subscription, heard } = listen(client, "orders", {
    resume: "e1:5:x",
    onCursorExpired: async () => "first",
  });
  s.socket.say(subscribed(1, 120, { recovered: false }), expired(1, 5, 120), records(1, 120, 122));
  await settle();
  assert.deepEqual(s.socket.sent.slice(1), [
    { type: "unsubscribe", sub: 1 },
    { type: "subscribe", sub: 2, stream: "orders", from: "first" },
  ]);
  s.socket.say(records(1, 122, 123), subscribed(2, 90), records(2, 90, 123));
  await settle();
  assert.deepEqual(heard.positions, range(90, 123));
  assert.equal(subscription.resume, "e1:123:x");
});

// Once, and without holes

test("what comes twice is handed out once", async (t) => {
  const s = stage(t);
  const client = await s.open();
  const { heard } = listen(client);
  s.socket.say(subscribed(1, 0), records(1, 0, 5), records(1, 3, 8), records(1, 2, 4));
  await settle();
  assert.deepEqual(heard.positions, range(0, 8));
});

test("the token doesn't go back with a frame that came before", async (t) => {
  const s = stage(t);
  const client = await s.open();
  const { subscription } = listen(client);
  s.socket.say(subscribed(1, 0), records(1, 0, 5), records(1, 2, 4));
  await settle();
  assert.equal(subscription.resume, "e1:5:x");
});

test("a hole that nobody announced is asked for again, from the last token", async (t) => {
  const s = stage(t);
  const client = await s.open();
  const { heard } = listen(client);
  s.socket.say(subscribed(1, 0), records(1, 0, 5));
  await settle();
  s.socket.say(records(1, 7, 9));
  await s.pass(500);
  assert.deepEqual(s.socket.sent.slice(1), [
    { type: "unsubscribe", sub: 1 },
    { type: "subscribe", sub: 2, stream: "orders", resume: "e1:5:x" },
  ]);
  s.socket.say(records(1, 9, 10), subscribed(2, 5), records(2, 5, 10));
  await settle();
  assert.deepEqual(heard.positions, range(0, 10));
  assert.deepEqual(heard.errors, []);
});

test("what a filter or the server left out is no hole, and nobody asks", async (t) => {
  for (const filter of [{}, { types: ["placed"] }, { key: "" }]) {
    const s = stage(t);
    const client = await s.open();
    const { heard } = listen(client, "orders", filter);
    s.socket.say(
      subscribed(1, 0),
      records(1, 3, 4, { since: 0, cursor: 6 }),
      records(1, 9, 10, { since: 6 }),
    );
    await s.pass(500);
    assert.deepEqual(heard.positions, [3, 9]);
    assert.equal(s.socket.of("subscribe").length, 1);
    t.mock.timers.reset();
  }
});

// The window

test("half a window is acknowledged at once, less a moment later, all in one message", async (t) => {
  const s = stage(t);
  const client = await s.open();
  listen(client, "a");
  listen(client, "b");
  const messages = [];
  s.socket.onsend = (frames) => messages.push(frames);
  s.socket.say(subscribed(1, 0), subscribed(2, 0), records(1, 0, 10), records(2, 0, 20));
  await settle();
  s.socket.say(records(1, 10, 30));
  await s.pass(50);
  assert.deepEqual(messages, []);
  await s.pass(50);
  assert.deepEqual(messages, [
    [
      { type: "ack", sub: 1, cursor: 30 },
      { type: "ack", sub: 2, cursor: 20 },
    ],
  ]);
  s.socket.say(records(1, 30, 279));
  await settle();
  assert.equal(messages.length, 1);
  s.socket.say(records(1, 279, 280));
  await settle();
  assert.deepEqual(messages[1], [{ type: "ack", sub: 1, cursor: 280 }]);
  await s.pass(1000);
  assert.equal(messages.length, 2);
});

test("a few big records are acknowledged at once too", async (t) => {
  const s = stage(t);
  const client = await s.open();
  listen(client);
  s.socket.say(subscribed(1, 0));
  const big = [record(0, { data: "x".repeat(70_000) })];
  s.socket.say(records(1, 0, 1, { records: big }));
  await settle();
  assert.deepEqual(s.socket.of("ack"), [{ type: "ack", sub: 1, cursor: 1 }]);
});

test("a slow handler pushes back: its frame is acknowledged when it is done", async (t) => {
  const s = stage(t);
  const client = await s.open();
  const work = [gate(), gate()];
  const started = [];
  const { subscription } = listen(client, "orders", {
    onRecords: ([{ position }]) => {
      started.push(position);
      return work[started.length - 1].promise;
    },
  });
  s.socket.say(subscribed(1, 0), records(1, 0, 300), records(1, 300, 500));
  await s.pass(1000);
  assert.deepEqual(started, [0], "one after the other");
  assert.deepEqual(s.socket.of("ack"), []);
  assert.equal(subscription.resume, "e1:0:");
  work[0].open();
  await settle();
  assert.deepEqual(started, [0, 300]);
  assert.deepEqual(s.socket.of("ack"), [{ type: "ack", sub: 1, cursor: 300 }]);
  assert.equal(subscription.resume, "e1:300:x");
});

test("cut while a handler works: its frame comes not again, the ones behind it do", async (t) => {
  const s = stage(t);
  const client = await s.open();
  const work = gate();
  const positions = [];
  const { subscription } = listen(client, "orders", {
    onRecords: async (batch) => {
      positions.push(...batch.map(({ position }) => position));
      await work.promise;
    },
  });
  s.socket.say(subscribed(1, 0), records(1, 0, 300), records(1, 300, 500));
  await settle();
  await cut(s);
  assert.equal(s.socket.sent[0].resume, "e1:300:x");
  s.socket.say(subscribed(2, 300), records(2, 300, 500));
  await s.pass(1000);
  work.open();
  await s.pass(1000);
  assert.deepEqual(positions, range(0, 500));
  assert.deepEqual(s.socket.of("ack"), [{ type: "ack", sub: 2, cursor: 500 }], "300 was of before");
  assert.equal(subscription.resume, "e1:500:x");
});

test("a handler that throws is reported, and the next record comes", async (t) => {
  const s = stage(t);
  const reported = t.mock.method(console, "error", () => {});
  const client = await s.open();
  const seen = [];
  listen(client, "orders", {
    onRecords: () => Promise.reject(new Error("rejected")),
    onRecord: ({ position }) => {
      seen.push(position);
      throw new Error("thrown");
    },
  });
  s.socket.say(subscribed(1, 0), records(1, 0, 2), records(1, 2, 3));
  await s.pass(150);
  assert.deepEqual(seen, [0, 1, 2]);
  assert.equal(reported.mock.callCount(), 5);
  assert.deepEqual(s.socket.of("ack"), [{ type: "ack", sub: 1, cursor: 3 }]);
  assert.equal(s.states.at(-1), "open");
});

test("onRecord gets one after the other, and none after unsubscribe", async (t) => {
  const s = stage(t);
  const client = await s.open();
  const seen = [];
  const { subscription } = listen(client, "orders", {
    onRecord: async ({ position }) => {
      seen.push(position);
      await null;
      if (position === 2) subscription.unsubscribe();
    },
  });
  s.socket.say(subscribed(1, 0), records(1, 0, 5));
  await settle();
  assert.deepEqual(seen, [0, 1, 2]);
});

// Errors

test("a deleted stream and a fault of the server are subscribed again, with patience", async (t) => {
  const s = stage(t);
  const client = await s.open();
  const { heard } = listen(client, "orders", { resume: "e1:3:x" });
  for (const [i, code] of ["unknown_stream", "failed", "failed"].entries()) {
    s.socket.say({ type: "error", code, message: "oh", sub: i + 1 });
    await s.pass(500 * 2 ** i - 50);
    assert.equal(s.socket.of("subscribe").length, i + 1);
    await s.pass(50);
    assert.deepEqual(s.socket.sent.at(-1), {
      type: "subscribe", sub: i + 2, stream: "orders", resume: "e1:3:x",
    });
  }
  assert.deepEqual(heard.errors[0], { code: "unknown_stream", message: "oh", final: false });
  assert.deepEqual(s.socket.of("unsubscribe"), [], "over there it had ended");
  await s.pass(10_000);
  s.socket.say({ type: "error", code: "failed", message: "after a good while", sub: 4 });
  await s.pass(500);
  assert.equal(s.socket.of("subscribe").length, 5);
});

test("a subscription that waits to try again doesn't, twice, when the socket is new", async (t) => {
  const s = stage(t);
  const client = await s.open();
  listen(client);
  s.socket.say({ type: "error", code: "failed", message: "oh", sub: 1 });
  s.socket.die();
  await s.fire("online");
  await s.accept();
  await s.pass(5000);
  assert.equal(s.socket.of("subscribe").length, 1);
});

test("denied and the like end a subscription, and no other", async (t) => {
  const s = stage(t);
  const client = await s.open();
  const codes = ["denied", "bad_name", "unauthenticated", "too_many", "of the future"];
  const all = codes.map((code) => listen(client, code));
  const other = listen(client, "other");
  for (const [i, code] of codes.entries()) {
    s.socket.say({ type: "error", code, message: "no", sub: i + 1 });
    assert.deepEqual(all[i].heard.errors, [{ code, message: "no", final: true }]);
    assert.ok(all[i].subscription.ended);
  }
  await cut(s);
  assert.deepEqual(s.socket.of("subscribe").map(({ stream }) => stream), ["other"]);
  assert.ok(!other.subscription.ended);
});

test("an error of the socket goes to the client's onError", async (t) => {
  const s = stage(t);
  await s.open();
  s.socket.say({ type: "error", code: "rate", message: "slow down" });
  assert.deepEqual(s.errors, [{ type: "error", code: "rate", message: "slow down" }]);
  assert.equal(s.states.at(-1), "open");
});

// Events

test("events are heard, acknowledged, and what was missed while away is a gap", async (t) => {
  const s = stage(t);
  const client = await s.open();
  const heard = [];
  client.events("emails", {
    onEvent: ({ event, number }) => heard.push([event, number]),
    onGap: ({ reason }) => heard.push(["gap", reason]),
    onSubscribed: () => heard.push(["subscribed"]),
  });
  const event = (number) => ({
    type: "event", sub: 1, event: "progress", job_id: "JOB1", data: 50, number,
  });
  s.socket.say({ type: "subscribed", sub: 1 }, event(0), event(1));
  s.socket.say({ type: "gap", sub: 1, reason: "broker" }, event(2));
  await s.pass(150);
  assert.deepEqual(s.socket.of("ack"), [{ type: "ack", sub: 1, cursor: 3 }]);
  await cut(s);
  s.socket.say({ type: "subscribed", sub: 2 });
  await settle();
  assert.deepEqual(heard, [
    ["subscribed"], ["progress", 0], ["progress", 1], ["gap", "broker"], ["progress", 2],
    ["gap", "reconnect"], ["subscribed"],
  ]);
});

test("half a window of events is acknowledged at once", async (t) => {
  const s = stage(t);
  const client = await s.open();
  client.events("emails", { onEvent: () => {} });
  s.socket.say({ type: "subscribed", sub: 1 });
  for (let number = 0; number < 250; number += 1) {
    s.socket.say({ type: "event", sub: 1, event: "e", job_id: "", data: null, number });
  }
  await settle();
  assert.deepEqual(s.socket.of("ack"), [{ type: "ack", sub: 1, cursor: 250 }]);
});

// The iterator, and the token that outlives a reload

test("for await takes the records one by one, and acknowledges what it has finished", async (t) => {
  const s = stage(t);
  const client = await s.open();
  const subscription = client.stream("orders", { from: "first" });
  const step = gate();
  const seen = [];
  const loop = (async () => {
    for await (const { position } of subscription) {
      seen.push(position);
      if (position === 2) await step.promise;
      if (position === 4) break;
    }
  })();
  s.socket.say(subscribed(1, 0), records(1, 0, 2), records(1, 2, 3));
  await s.pass(200);
  assert.deepEqual(seen, [0, 1, 2]);
  assert.deepEqual(s.socket.of("ack"), [{ type: "ack", sub: 1, cursor: 2 }]);
  step.open();
  s.socket.say(records(1, 3, 6));
  await loop;
  assert.deepEqual(seen, [0, 1, 2, 3, 4]);
  assert.ok(subscription.ended);
});

test("for await ends with its subscription", async (t) => {
  const s = stage(t);
  const client = await s.open();
  const loop = (async () => {
    for await (const _ of client.stream("orders")) assert.fail();
  })();
  await settle();
  s.socket.say({ type: "error", code: "denied", message: "no", sub: 1 });
  await loop;
});

test("persist: after a reload it goes on where its handlers were done", async (t) => {
  const s = stage(t);
  const work = gate();
  const client = await s.open();
  const options = { persist: "echomq:orders", resume: "e1:0:", onRecords: () => work.promise };
  client.stream("orders", options);
  s.socket.say(subscribed(1, 0), records(1, 0, 3));
  await settle();
  assert.equal(s.stored.get("echomq:orders"), "e1:0:");
  work.open();
  await settle();
  assert.equal(s.stored.get("echomq:orders"), "e1:3:x");
  client.close();
  (await s.open()).stream("orders", options);
  assert.equal(s.socket.sent[0].resume, "e1:3:x");
});

test("persist where storage is forbidden is no error", async (t) => {
  const s = stage(t);
  sessionStorage.getItem = sessionStorage.setItem = () => {
    throw new Error("SecurityError");
  };
  const client = await s.open();
  const { heard } = listen(client, "orders", { persist: "k", resume: "e1:0:" });
  s.socket.say(subscribed(1, 0), records(1, 0, 3));
  await settle();
  assert.deepEqual(heard.positions, [0, 1, 2]);
});
