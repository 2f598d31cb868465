/** How long to wait before the next attempt to connect, in milliseconds. */

export const SHORTEST = 250;
export const LONGEST = 10_000;

/**
 * Doubles from SHORTEST to LONGEST; a third of it is random, so that the pages of a
 * server that comes back don't all return in the same instant.
 */
export function delay(attempt, random = Math.random) {
  const full = Math.min(LONGEST, SHORTEST * 2 ** Math.min(attempt, 20));
  return Math.round(full * (2 / 3 + random() / 3));
}
