/** A list of earthquakes, the newest on top, with marks where some are missing. */

import { count, depth, magnitude, plural, strength, time } from "./format.js";

/** Rows kept; older ones leave the page (not the log). */
const ROWS_MAX = 2000;

const piece = (name, text) => {
  const span = document.createElement("span");
  span.className = name;
  span.textContent = text;
  return span;
};

function row({ position, quake }) {
  const item = document.createElement("li");
  item.dataset.position = position;
  item.dataset.id = quake.id;
  const size = piece(`mag ${strength(quake.mag)}`, magnitude(quake.mag));
  size.title = "magnitude";
  const kind = quake.type === "earthquake" ? "" : ` · ${quake.type}`;
  item.append(
    piece("position", count(position)),
    size,
    piece("place", quake.place),
    piece("when", `${time(quake.time)} · ${depth(quake.depth_km)} deep${kind}`),
  );
  return item;
}

export class QuakeList {
  #list;
  #rows = new Map(); // position -> <li>
  #gaps = new Map(); // first position after the gap, or "top" -> <li>

  constructor(list) {
    this.#list = list;
  }

  /** Show entries ({position, quake}), whatever their order. */
  add(entries) {
    const fragment = document.createDocumentFragment();
    let top = this.#topPosition();
    for (const entry of entries) {
      if (this.#rows.has(entry.position)) continue;
      const item = row(entry);
      this.#rows.set(entry.position, item);
      if (entry.position > top) {
        fragment.prepend(item);
        top = entry.position;
      } else {
        this.#insertLate(fragment, item, entry.position);
      }
    }
    this.#list.prepend(fragment);
    this.#trim();
  }

  clear() {
    this.#list.replaceChildren();
    this.#rows.clear();
    this.#gaps.clear();
  }

  setLost(position, lost) {
    this.#rows.get(position)?.classList.toggle("lost", lost);
  }

  /** Show what is missing: ranges [from, to) of positions. */
  showGaps(ranges) {
    const stale = new Set(this.#gaps.keys());
    for (const [from, to] of ranges) {
      const after = this.#rows.get(to);
      const key = after ? to : "top";
      if (!after && to <= this.#topPosition()) continue; // its row has left the page
      stale.delete(key);
      this.#showGap(key, after, from, to);
    }
    for (const key of stale) {
      this.#gaps.get(key).remove();
      this.#gaps.delete(key);
    }
  }

  #showGap(key, after, from, to) {
    let gap = this.#gaps.get(key);
    if (!gap) {
      gap = document.createElement("li");
      gap.className = "gap";
      this.#gaps.set(key, gap);
    }
    const text = `${plural(to - from, "earthquake")} never came`;
    if (gap.textContent !== text) gap.textContent = text;
    gap.dataset.from = from;
    gap.dataset.to = to;
    if (after) {
      if (after.nextSibling !== gap) after.after(gap);
    } else if (this.#list.firstChild !== gap) {
      this.#list.prepend(gap);
    }
  }

  #topPosition() {
    for (const item of this.#list.children) {
      if (item.dataset.position) return Number(item.dataset.position);
    }
    return -1;
  }

  /** An event that was overtaken by a later one goes where it belongs. */
  #insertLate(fragment, item, position) {
    for (const parent of [fragment, this.#list]) {
      for (const other of parent.children) {
        if (other.dataset.position && Number(other.dataset.position) < position) {
          other.before(item);
          return;
        }
      }
    }
    this.#list.append(item);
  }

  #trim() {
    let surplus = this.#rows.size - ROWS_MAX;
    while (surplus > 0) {
      const last = this.#list.lastElementChild;
      if (last.dataset.position) {
        this.#rows.delete(Number(last.dataset.position));
        surplus -= 1;
      } else {
        for (const [key, gap] of this.#gaps) if (gap === last) this.#gaps.delete(key);
      }
      last.remove();
    }
  }
}
