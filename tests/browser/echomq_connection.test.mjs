import assert from "node:assert/strict";
import { test } from "node:test";

import { DEFAULTS, delay, isFatal } from "../../echomq_app/static/echomq/echomq.js";
import { WELCOME, gate, records, settle, stage, subscribed } from "./echomq_fake.mjs";

const LAST = (list) => list.at(-1);

test("the wait doubles from half a second to a minute, and all of it is random", () => {
  const longest = (attempt) => delay(attempt, DEFAULTS, () => 1);
  assert.deepEqual([0, 1, 2, 6, 7, 1000].map(longest), [500, 1000, 2000, 32000, 60000, 60000]);
  assert.equal(delay(9, DEFAULTS, () => 0), 0);
  for (let i = 0; i < 100; i += 1) assert.ok(delay(3) <= 4000);
});

test("a close code is fatal when the same attempt would fail again", () => {
  for (const code of [4400, 4413]) assert.ok(isFatal(code, true) && isFatal(code, false));
  assert.ok(isFatal(4401, false));
  assert.ok(!isFatal(4401, true), "there is a new token to try");
  for (const code of [1000, 1001, 1006, 1011, 1012, 4408, 4429]) assert.ok(!isFatal(code, false));
});

test("a path becomes a ws address of this site, and the protocol is named", async (t) => {
  const s = stage(t);
  await s.open();
  assert.equal(s.socket.url, "wss://example.org/ws/echomq/");
  assert.equal(s.socket.protocol, "echomq.v1");
  assert.deepEqual(s.states, ["connecting", "open"]);
});

test("the token is the first frame, and nothing follows before it is accepted", async (t) => {
  const s = stage(t);
  s.connect({ getToken: async () => "T1" }).stream("orders");
  await s.accept();
  assert.deepEqual(s.socket.sent, [{ type: "auth", token: "T1" }]);
  assert.equal(LAST(s.states), "connecting");
  s.socket.say(WELCOME);
  assert.deepEqual(s.socket.sent.slice(1), [{ type: "subscribe", sub: 1, stream: "orders" }]);
  assert.equal(LAST(s.states), "open");
});

test("each attempt asks for a token of its own", async (t) => {
  const s = stage(t);
  let number = 0;
  const client = s.connect({ getToken: () => `T${++number}` });
  client.stream("orders");
  await s.accept();
  s.socket.say({ type: "error", code: "bad_token", message: "expired" });
  assert.equal(s.errors[0].code, "bad_token");
  assert.equal(LAST(s.states), "waiting");
  await s.pass(500);
  await s.accept();
  s.socket.say(WELCOME);
  s.socket.die(4401);
  assert.equal(LAST(s.states), "waiting");
  await s.pass(1000);
  await s.accept();
  assert.deepEqual(s.socket.sent, [{ type: "auth", token: "T3" }]);
});

test("what stands behind a refused token in the same message counts for nothing", async (t) => {
  const s = stage(t);
  s.connect({ getToken: () => "T" });
  await s.accept();
  s.socket.say({ type: "error", code: "bad_token", message: "expired" }, WELCOME);
  assert.deepEqual(s.states, ["connecting", "waiting"]);
});

test("a getToken that fails is tried again, and one that comes too late is not used", async (t) => {
  const s = stage(t);
  const late = gate();
  const answers = [() => Promise.reject(new Error("offline")), () => late.promise, () => "T3"];
  s.connect({ getToken: () => answers.shift()() });
  await settle();
  assert.match(s.errors[0].message, /offline/);
  assert.equal(LAST(s.states), "waiting");
  await s.pass(500 + DEFAULTS.connectTimeout);
  assert.equal(s.sockets, 0);
  await s.pass(1000);
  assert.equal(s.sockets, 1);
  late.open("T2");
  await settle();
  assert.equal(s.sockets, 1);
});

test("without getToken, a session that is over ends it; so do frames that are refused", async (t) => {
  for (const code of [4400, 4401, 4413]) {
    await t.test(String(code), async (t) => {
      const s = stage(t);
      const client = await s.open();
      const told = [];
      const subscription = client.stream("orders", { onError: (error) => told.push(error) });
      s.socket.say({ type: "error", code: "bad_frame", message: "the last word" });
      s.socket.die(code);
      assert.equal(LAST(s.states), "closed");
      assert.deepEqual(LAST(s.infos), { code, reason: "the last word" });
      assert.deepEqual(told, [{ code: "closed", message: "the last word", final: true }]);
      assert.ok(subscription.ended);
      await s.pass(120_000);
      assert.equal(s.sockets, 1);
      assert.throws(() => client.stream("orders"), /connect\(\) again/);
    });
  }
});

test("all other ends are waited out, longer and longer", async (t) => {
  const s = stage(t);
  await s.open();
  for (const [code, wait] of [[1006, 500], [1012, 1000], [4408, 2000], [4429, 4000], [1011, 8000]]) {
    s.socket.die(code);
    assert.deepEqual([LAST(s.states), LAST(s.infos)], ["waiting", { retryIn: wait }]);
    const sockets = s.sockets;
    await s.pass(wait - 50);
    assert.equal(s.sockets, sockets);
    await s.pass(50);
    await s.accept(); // good, but not for long enough to be trusted
  }
});

test("the wait begins small again only after a connection that lasted", async (t) => {
  const s = stage(t);
  await s.open();
  for (let i = 0; i < 5; i += 1) {
    s.socket.die();
    await s.pass(LAST(s.infos).retryIn);
    await s.accept();
  }
  await s.pass(9_900);
  s.socket.die();
  assert.equal(LAST(s.infos).retryIn, 16_000);
  await s.pass(16_000);
  await s.accept();
  await s.pass(10_000);
  s.socket.die();
  assert.equal(LAST(s.infos).retryIn, 500);
});

test("a socket that opens and is never greeted was not good", async (t) => {
  const s = stage(t);
  s.connect();
  await settle();
  s.socket.accept();
  await s.pass(DEFAULTS.connectTimeout);
  assert.equal(LAST(s.states), "waiting");
  await s.pass(500);
  s.socket.accept();
  await s.pass(DEFAULTS.connectTimeout);
  assert.equal(LAST(s.infos).retryIn, 1000);
});

test("the network is back, or somebody looks: no more waiting", async (t) => {
  for (const event of ["online", "show"]) {
    await t.test(event, async (t) => {
      const s = stage(t);
      await s.open();
      if (event === "show") await s.hide();
      s.socket.die();
      assert.equal(LAST(s.states), "waiting");
      await (event === "show" ? s.show() : s.fire("online"));
      assert.equal(s.sockets, 2);
      await s.pass(60_000 - DEFAULTS.connectTimeout - 1000);
      assert.equal(s.sockets, 3, "the timer of the wait that was cut short did not fire");
    });
  }
});

test("a tab that is hidden for long lets go, and resumes when it is shown", async (t) => {
  const s = stage(t);
  const client = await s.open();
  client.stream("orders");
  s.socket.say(subscribed(1, 7));
  await s.hide();
  for (let i = 0; i < 15; i += 1) {
    await s.pass(20_000);
    if (i < 14) s.socket.say({ type: "pong" });
  }
  assert.equal(LAST(s.states), "paused");
  assert.equal(s.socket.readyState, 3);
  await s.fire("online");
  await s.pass(600_000);
  assert.equal(s.sockets, 1);
  await s.show();
  await s.accept();
  assert.equal(s.socket.of("subscribe")[0].resume, "e1:7:");
});

test("a tab that is hidden for a while keeps its connection", async (t) => {
  const s = stage(t);
  await s.open({ pingInterval: 10 ** 9 });
  await s.hide();
  await s.pass(DEFAULTS.pauseAfter - 50);
  await s.show();
  await s.pass(5000);
  assert.deepEqual(s.states, ["connecting", "open"]);
  assert.equal(s.socket.of("ping").length, 1, "and asks at once whether it is still good");
});

test("pauseAfter: Infinity never lets go", async (t) => {
  const s = stage(t);
  await s.open({ pauseAfter: Infinity, pingInterval: 10 ** 9 });
  await s.hide();
  await s.pass(DEFAULTS.pauseAfter * 2);
  assert.equal(LAST(s.states), "open");
});

test("a page in the back/forward cache has no socket", async (t) => {
  const s = stage(t);
  await s.open();
  await s.fire("pagehide", { persisted: true });
  assert.equal(LAST(s.states), "paused");
  await s.fire("pageshow", { persisted: true });
  await s.accept();
  assert.equal(LAST(s.states), "open");
});

test("silence is asked after, and no answer is a dead connection", async (t) => {
  const s = stage(t);
  await s.open();
  await s.pass(24_950);
  assert.equal(s.socket.of("ping").length, 0);
  await s.pass(50);
  assert.equal(s.socket.of("ping").length, 1);
  s.socket.say({ type: "pong" });
  await s.pass(30_000);
  assert.equal(s.socket.of("ping").length, 2);
  await s.pass(4_950);
  assert.equal(LAST(s.states), "open");
  await s.pass(50);
  assert.equal(LAST(s.states), "waiting");
  assert.equal(s.socket.readyState, 3);
});

test("while there is news nobody pings; any message is an answer", async (t) => {
  const s = stage(t);
  const client = await s.open();
  client.stream("orders");
  s.socket.say(subscribed(1, 0));
  for (let i = 0; i < 10; i += 1) {
    await s.pass(20_000);
    s.socket.say(records(1, i, i + 1));
  }
  assert.equal(s.socket.of("ping").length, 0);
  await s.pass(25_000);
  assert.equal(s.socket.of("ping").length, 1);
  s.socket.say(records(1, 10, 11));
  await s.pass(12_000);
  assert.equal(LAST(s.states), "open");
});

test("after a sleep the connection is asked, and given up ten seconds later", async (t) => {
  const s = stage(t);
  await s.open();
  await s.pass(10_000);
  s.sleep(3_600_000);
  await s.pass(50);
  assert.equal(s.socket.of("ping").length, 1);
  await s.pass(10_000);
  assert.equal(LAST(s.states), "waiting");
  assert.equal(LAST(s.infos).retryIn, 500);
});

test("asleep between ping and pong: asked once more, then given up", async (t) => {
  for (const answers of [true, false]) {
    await t.test(answers ? "answers" : "is dead", async (t) => {
      const s = stage(t);
      await s.open();
      await s.pass(25_000);
      s.sleep(3_600_000);
      await s.pass(50); // the pong may lie in the buffer, behind this timer
      assert.equal(LAST(s.states), "open");
      assert.equal(s.socket.of("ping").length, 2);
      if (answers) s.socket.say({ type: "pong" });
      await s.pass(10_000);
      assert.equal(LAST(s.states), answers ? "open" : "waiting");
    });
  }
});

test("a second sleep in a row is no excuse", async (t) => {
  const s = stage(t);
  await s.open();
  await s.pass(25_000);
  for (const state of ["open", "waiting"]) {
    s.sleep(3_600_000);
    await s.pass(50);
    assert.equal(LAST(s.states), state);
  }
});

test("what an abandoned socket still reports counts for nothing", async (t) => {
  const s = stage(t);
  await s.open();
  const old = s.socket;
  await s.pass(25_000 + 10_000 + 500);
  await s.accept();
  const states = s.states.length;
  old.say({ type: "error", code: "rate", message: "too late" });
  old.die(4400);
  assert.equal(s.states.length, states);
  assert.deepEqual(s.errors, []);
});

test("what is no JSON breaks the connection, not the page", async (t) => {
  const s = stage(t);
  await s.open();
  s.socket.onmessage({ data: "<html>" });
  assert.equal(LAST(s.states), "waiting");
});

test("a frame of a kind that is not known yet is passed over", async (t) => {
  const s = stage(t);
  const client = await s.open();
  client.stream("orders");
  s.socket.say({ type: "news" }, { type: "news", sub: 1 }, { type: "news", sub: 99 });
  assert.equal(LAST(s.states), "open");
});

test("close() is the end: no timer, no listener, nothing more to the handlers", async (t) => {
  const s = stage(t);
  const client = await s.open();
  const told = [];
  const subscription = client.stream("orders", { onError: (e) => told.push(e) });
  client.close();
  client.close();
  assert.deepEqual(s.states, ["connecting", "open", "closed"]);
  assert.equal(s.socket.readyState, 3);
  assert.ok(subscription.ended);
  await s.fire("online");
  await s.hide();
  await s.show();
  await s.pass(600_000);
  assert.equal(s.sockets, 1);
  assert.deepEqual(told, []);
});

test("close() from a handler of the error that breaks the connection stays closed", async (t) => {
  const s = stage(t);
  const client = s.connect({ getToken: () => "T", onError: () => client.close() });
  await s.accept();
  s.socket.say({ type: "error", code: "bad_token", message: "of nobody" });
  await s.pass(1000);
  assert.deepEqual(s.states, ["connecting", "closed"]);
  assert.equal(s.sockets, 1);
});

test("close() before the socket is there leaves none behind", async (t) => {
  const s = stage(t);
  s.connect().close();
  await settle();
  const late = gate();
  const client = s.connect({ getToken: () => late.promise });
  await settle();
  client.close();
  late.open("T");
  await settle();
  assert.equal(s.sockets, 0);
});

test("onState tells the state at once, can be taken back, and may throw", async (t) => {
  const s = stage(t);
  const reported = t.mock.method(console, "error", () => {});
  const client = s.connect();
  const heard = [];
  client.onState(() => {
    throw new Error("broken badge");
  });
  const stop = client.onState((state) => heard.push(state));
  await s.accept();
  stop();
  s.socket.die();
  await settle();
  assert.deepEqual(heard, ["connecting", "open"]);
  assert.equal(LAST(s.states), "waiting");
  assert.equal(reported.mock.callCount(), 3);
});
