import assert from "node:assert/strict";
import { test } from "node:test";

import { LONGEST, SHORTEST, delay } from "../../project/seismic/static/seismic/backoff.js";

test("the wait doubles up to the longest, and never goes beyond", () => {
  const waits = Array.from({ length: 40 }, (_, attempt) => delay(attempt, () => 1));
  assert.equal(waits[0], SHORTEST);
  assert.equal(waits[1], 2 * SHORTEST);
  assert.equal(waits.at(-1), LONGEST);
});

test("a third of it is random", () => {
  assert.equal(delay(0, () => 0), Math.round((SHORTEST * 2) / 3));
  for (let i = 0; i < 100; i += 1) assert.ok(delay(3) <= 8 * SHORTEST);
});
