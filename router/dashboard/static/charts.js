// Lines over the last minutes; the legend shows the values under the pointer.

import { h, s, setText } from "./dom.js";
import { clock } from "./format.js";

const HEIGHT = 150, LEFT = 54, RIGHT = 6, TOP = 8, BOTTOM = 20;

export class Chart {
  // lines: [{ name, label, get(view) → values }]; format: value → text; area: the first line is filled down to zero.
  constructor(title, lines, format, { area = false } = {}) {
    this.lines = lines;
    this.format = format;
    this.area = area;
    this.keys = lines.map((line) => h("b", {}, "–"));
    this.window = h("span", { class: "soft" });
    const legend = h("div", { class: "keys" }, lines.map((line, index) => h("span", { class: line.key }, h("i"), `${line.label} `, this.keys[index])), this.window);
    this.svg = s("svg", { class: "chart", role: "img" });
    this.element = h("div", {}, title ? h("h2", {}, title) : null, legend, this.svg);
    this.title = title;
    this.hover = null;
    this.width = 400;
    new ResizeObserver(() => { this.width = Math.max(160, this.svg.clientWidth); this.draw(); }).observe(this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => { this.hover = null; this.draw(); });
  }

  // latest: the legend's values, of the time that `window` names, while no slice is under the pointer.
  update(history, values, latest, window) {
    this.history = history;
    this.values = values;
    this.latest = latest;
    setText(this.window, window);
    this.draw();
  }

  point(event) {
    if (!this.history) return;
    const box = this.svg.getBoundingClientRect();
    const slots = this.values[0].length;
    const slot = Math.round(((event.clientX - box.left - LEFT) / (this.width - LEFT - RIGHT)) * (slots - 1));
    this.hover = Math.min(slots - 1, Math.max(0, slot));
    this.draw();
  }

  draw() {
    if (!this.values) return;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    const all = this.values.flat().filter((value) => value !== null);
    const top = niceTop(Math.max(0, ...all));
    const slots = this.values[0].length;
    const x = (slot) => LEFT + (slot / (slots - 1)) * (this.width - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM);
    const parts = [...this.gridLines(top, y, slots)];
    if (this.values.length > 1 && !this.area) parts.push(s("path", { class: "band", d: bandPath(this.values[0], this.values.at(-1), x, y) }));
    if (this.area) parts.push(s("path", { class: "area-a", d: bandPath(this.values[0].map((value) => (value === null ? null : 0)), this.values[0], x, y) }));
    this.values.forEach((line, index) => parts.push(s("path", { class: this.lines[index].name, d: linePath(line, x, y) })));
    if (this.hover !== null) parts.push(...this.cross(x(this.hover)));
    if (!all.length) parts.push(s("text", { x: this.width / 2 + 20, y: HEIGHT / 2, "text-anchor": "middle" }, "no data in the last ten minutes"));
    this.svg.replaceChildren(...parts);
    this.showValues(all.length > 0);
  }

  *gridLines(top, y, slots) {
    for (const share of [0, 0.5, 1]) {
      yield s("line", { class: "grid-line", x1: LEFT, x2: this.width - RIGHT, y1: y(top * share), y2: y(top * share) });
      yield s("text", { x: LEFT - 6, y: y(top * share) + 3.5, "text-anchor": "end" }, share ? this.format(top * share) : "0");
    }
    const minutes = (slots * this.history.slice_s) / 60;
    yield s("text", { x: LEFT, y: HEIGHT - 5 }, `−${Math.round(minutes)} min`);
    yield s("text", { x: this.width - RIGHT, y: HEIGHT - 5, "text-anchor": "end" }, "now");
  }

  *cross(x) {
    const slots = this.values[0].length;
    const at = clock(this.history.last_unix_s - (slots - 1 - this.hover) * this.history.slice_s);
    const anchor = x > this.width / 2 ? "end" : "start";
    yield s("line", { class: "cross", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM });
    yield s("text", { x: x + (anchor === "end" ? -5 : 5), y: TOP + 9, "text-anchor": anchor }, at);
  }

  showValues(hasValues) {
    const slot = this.hover;
    this.window.style.visibility = slot === null ? "" : "hidden";
    const shown = slot === null ? this.latest : this.values.map((line) => line[slot]);
    this.keys.forEach((key, index) => setText(key, shown[index] === null || shown[index] === undefined ? "–" : this.format(shown[index])));
    const words = this.lines.map((line, index) => `${line.label} ${this.keys[index].textContent}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title ?? "Chart"}: ${hasValues ? words : "no data yet"}`);
  }
}

function niceTop(most) {
  if (!(most > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= most) * power;
}

// The line breaks where there is no value; a value between two gaps is a dot.
function linePath(values, x, y) {
  let path = "", open = false;
  values.forEach((value, slot) => {
    if (value === null) { open = false; return; }
    path += `${open ? "L" : "M"}${x(slot).toFixed(1)},${y(value).toFixed(1)}`;
    if (!open && (values[slot + 1] ?? null) === null) path += "h.1";
    open = true;
  });
  return path;
}

function bandPath(low, high, x, y) {
  let path = "", slot = 0;
  while (slot < high.length) {
    if (high[slot] === null || low[slot] === null) { slot += 1; continue; }
    const start = slot;
    while (slot < high.length && high[slot] !== null && low[slot] !== null) slot += 1;
    const range = Array.from({ length: slot - start }, (_, index) => start + index);
    path += `M${range.map((at) => `${x(at).toFixed(1)},${y(high[at]).toFixed(1)}`).join("L")}L${range.reverse().map((at) => `${x(at).toFixed(1)},${y(low[at]).toFixed(1)}`).join("L")}Z`;
  }
  return path;
}

// A small line without axes. `values` may hold nulls, drawn as 0; a null at the end, of the open slice, repeats the value before.
export function sparkline(svg, values) {
  const known = values.with(-1, values.at(-1) ?? values.at(-2)).map((value) => value ?? 0);
  const top = Math.max(1e-12, ...known);
  const points = known.map((value, slot) => `${((slot / (known.length - 1)) * 100).toFixed(2)},${(28 - (value / top) * 26).toFixed(2)}`);
  svg.setAttribute("viewBox", "0 0 100 30");
  svg.setAttribute("preserveAspectRatio", "none");
  if (!svg.childElementCount) svg.append(s("polygon", { class: "spark-fill" }), s("polyline", { class: "spark-line" }));
  svg.firstChild.setAttribute("points", `0,30 ${points.join(" ")} 100,30`);
  svg.lastChild.setAttribute("points", points.join(" "));
}
