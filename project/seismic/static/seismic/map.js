/**
 * Dots on a map: longitude and latitude in tenths of a degree, no projection.
 * Filled: the feed told it too. Hollow: only the log knows.
 */

import { depthClass } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const VIEWS = { world: [0, 50, 3600, 1560], america: [60, 160, 1200, 520] };
const DOTS_MAX = 5000;
const PULSE_FROM = 4.5; // magnitude

export class QuakeMap {
  #svg;
  #dots;
  #byPosition = new Map();
  #scale = 1;

  constructor(svg) {
    this.#svg = svg;
    this.#dots = svg.querySelector(".dots");
    this.#graticule(svg.querySelector(".graticule"));
    this.show("world");
  }

  add(records, { quiet }) {
    const fragment = document.createDocumentFragment();
    for (const { position, data } of records) {
      const dot = document.createElementNS(SVG, "circle");
      dot.setAttribute("cx", (data.longitude + 180) * 10);
      dot.setAttribute("cy", (90 - data.latitude) * 10);
      // Only the strong ones pulse: every frame of a pulse paints the whole map.
      const pulse = !quiet && data.mag >= PULSE_FROM ? " new" : "";
      dot.setAttribute("class", `dot ${depthClass(data.depth_km)}${pulse}`);
      dot.dataset.size = 5 + 2.4 ** Math.max(0, data.mag - 1) / 1.6;
      dot.setAttribute("r", dot.dataset.size * this.#scale);
      this.#byPosition.set(position, dot);
      fragment.append(dot);
    }
    this.#dots.append(fragment);
    for (const [position, dot] of this.#byPosition) {
      if (this.#byPosition.size <= DOTS_MAX) break;
      dot.remove();
      this.#byPosition.delete(position);
    }
  }

  setLost(position, lost) {
    this.#byPosition.get(position)?.classList.toggle("lost", lost);
  }

  clear() {
    this.#dots.replaceChildren();
    this.#byPosition.clear();
  }

  /** Show "world" or "america"; dots keep about their size on the screen. */
  show(name) {
    const view = VIEWS[name];
    this.#svg.setAttribute("viewBox", view.join(" "));
    this.#scale = name === "world" ? 1 : 0.5;
    for (const dot of this.#byPosition.values()) {
      dot.setAttribute("r", dot.dataset.size * this.#scale);
    }
  }

  #graticule(path) {
    const lines = [];
    for (let x = 0; x <= 3600; x += 300) lines.push(`M${x} 0V1800`);
    for (let y = 0; y <= 1800; y += 300) lines.push(`M0 ${y}H3600`);
    path.setAttribute("d", lines.join(""));
  }
}
