import assert from "node:assert/strict";
import { test } from "node:test";

import { describe, speedOf } from "../../project/seismic/static/seismic/controls.js";

test("the slider reaches both ends and rises", () => {
  assert.equal(speedOf(0, 1, 2000), 1);
  assert.equal(speedOf(100, 1, 2000), 2000);
  for (let i = 1; i <= 100; i += 1) assert.ok(speedOf(i, 1, 2000) >= speedOf(i - 1, 1, 2000));
});

test("a second replay says that nothing was added", () => {
  const result = { added: 0, duplicates: 1707 };
  assert.match(describe({ state: "completed", result }), /Nothing was added: all 1,707/);
});

test("a cancelled one gives the reason", () => {
  assert.equal(describe({ state: "cancelled", reason: "seen enough" }), "Cancelled: seen enough.");
  assert.equal(describe({ state: "cancelled", reason: "" }), "Cancelled: no reason given.");
});

test("another worker that goes on is told", () => {
  assert.match(describe({ state: "running", attempt: 2, note: "5 added" }), /Attempt 2/);
});
