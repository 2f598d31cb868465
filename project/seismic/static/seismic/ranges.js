/**
 * Sets of positions, kept as sorted, disjoint, non-touching ranges [from, to).
 * A stream without holes is one range, however long it runs. Nothing is changed in place.
 */

/** Add one position. Returns the same array when it was there already. */
export function add(ranges, position) {
  let low = 0;
  let high = ranges.length;
  while (low < high) {
    // the first range that ends at or after the position
    const middle = (low + high) >> 1;
    if (ranges[middle][1] < position) low = middle + 1;
    else high = middle;
  }
  const at = ranges[low];
  if (at && at[0] <= position && position < at[1]) return ranges;
  let from = position;
  let to = position + 1;
  let end = low;
  while (end < ranges.length && ranges[end][0] <= to) {
    from = Math.min(from, ranges[end][0]);
    to = Math.max(to, ranges[end][1]);
    end += 1;
  }
  return [...ranges.slice(0, low), [from, to], ...ranges.slice(end)];
}

export function has(ranges, position) {
  return ranges.some(([from, to]) => from <= position && position < to);
}

export function count(ranges) {
  return ranges.reduce((sum, [from, to]) => sum + to - from, 0);
}

/** What of [from, to) is in none of the ranges. */
export function holes(ranges, from, to) {
  const found = [];
  let next = from;
  for (const [start, end] of ranges) {
    if (start >= to) break;
    if (start > next) found.push([next, start]);
    next = Math.max(next, end);
  }
  if (next < to) found.push([next, to]);
  return found;
}

/** What is in `ranges` and not in `others`. */
export function without(ranges, others) {
  return ranges.flatMap(([from, to]) => holes(others, from, to));
}

/** The highest position plus one, or `otherwise` for an empty set. */
export function end(ranges, otherwise = 0) {
  return ranges.length ? ranges[ranges.length - 1][1] : otherwise;
}
