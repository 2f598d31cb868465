import assert from "node:assert/strict";
import { test } from "node:test";

import * as ranges from "../../project/seismic/static/seismic/ranges.js";

test("positions in any order become the fewest ranges", () => {
  const set = [5, 3, 4, 9, 0, 4].reduce(ranges.add, []);
  assert.deepEqual(set, [[0, 1], [3, 6], [9, 10]]);
  assert.equal(ranges.count(set), 5);
});

test("a repeat gives the same array back, and nothing is changed in place", () => {
  const set = [[3, 6]];
  assert.equal(ranges.add(set, 4), set);
  assert.deepEqual(ranges.add(set, 6), [[3, 7]]);
  assert.deepEqual(set, [[3, 6]]);
});

test("a position that fits between two ranges joins them", () => {
  assert.deepEqual(ranges.add([[0, 2], [3, 5], [9, 10]], 2), [[0, 5], [9, 10]]);
});

test("holes are what is missing of a span", () => {
  const set = [[2, 4], [6, 8]];
  assert.deepEqual(ranges.holes(set, 0, 10), [[0, 2], [4, 6], [8, 10]]);
  assert.deepEqual(ranges.holes(set, 3, 7), [[4, 6]]);
  assert.deepEqual(ranges.holes(set, 2, 4), []);
  assert.deepEqual(ranges.holes([], 5, 5), []);
});

test("without takes ranges away from ranges", () => {
  assert.deepEqual(ranges.without([[0, 10], [20, 30]], [[5, 25]]), [[0, 5], [25, 30]]);
});

test("agrees with a plain Set on random input", () => {
  // A small generator of our own, so that a failure comes back.
  let seed = 42;
  const random = (below) => {
    seed = (seed * 1_103_515_245 + 12_345) % 2 ** 31;
    return seed % below;
  };
  for (let round = 0; round < 300; round += 1) {
    let set = [];
    const plain = new Set();
    for (let i = random(60); i > 0; i -= 1) {
      const position = random(50);
      set = ranges.add(set, position);
      plain.add(position);
    }
    assert.equal(ranges.count(set), plain.size);
    const missing = [];
    for (let p = 5; p < 45; p += 1) if (!plain.has(p)) missing.push(p);
    const found = ranges.holes(set, 5, 45).flatMap(([from, to]) =>
      Array.from({ length: to - from }, (_, i) => from + i));
    assert.deepEqual(found, missing);
  }
});
