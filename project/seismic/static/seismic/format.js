/** How values are written on the page. */

const number = new Intl.NumberFormat("en-GB");
const moment = new Intl.DateTimeFormat("en-GB", {
  day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", timeZone: "UTC",
});

export const count = (value) => number.format(value);

export const plural = (value, one, many = `${one}s`) =>
  `${count(value)} ${value === 1 ? one : many}`;

export const time = (milliseconds) => moment.format(milliseconds);

export const magnitude = (value) => value.toFixed(1).replace("-", "\u2212");

/** Classes of magnitude and depth, for colours: see page.css. */
export function strength(value) {
  if (value < 2.5) return "minor";
  if (value < 4.5) return "light";
  return value < 6 ? "strong" : "major";
}

export function depthClass(kilometres) {
  if (kilometres < 10) return "surface";
  if (kilometres < 70) return "shallow";
  return kilometres < 300 ? "middle" : "deep";
}

export const depth = (kilometres) => `${Math.round(kilometres).toString().replace("-", "\u2212")} km`;
