// Workers under the roofline of their devices, both axes logarithmic. The ridge is at 1, whatever the device.

import { h, keyed, s, setText } from "./dom.js";
import { count, share, workerName } from "./format.js";

const WIDTH = 320, HEIGHT = 168, LEFT = 40, RIGHT = 10, TOP = 12, BOTTOM = 30;
const TICKS = [0.001, 0.01, 0.1, 1, 10, 100];

export class Roofline {
  constructor(holder) {
    this.svg = s("svg", { class: "chart roof", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
    this.frame = s("g", {});
    this.points = s("g", {});
    this.svg.append(this.frame, this.points);
    this.none = h("p", { class: "empty" }, "No steps in the last seconds.");
    holder.append(this.svg, this.none);
  }

  update(view) {
    const points = view.workers.filter((worker) => worker.mfu > 0 && worker.mbu > 0).map(pointOf);
    this.none.hidden = points.length > 0;
    const least = Math.min(0.1, ...points.map((point) => Math.min(point.x, point.y)));
    const from = 10 ** Math.floor(Math.log10(least)), to = Math.max(10, 10 ** Math.ceil(Math.log10(Math.max(1, ...points.map((point) => point.x)))));
    const scale = (value, low, high, start, end) => start + (Math.log(value / low) / Math.log(high / low)) * (end - start);
    const x = (value) => scale(Math.min(to, Math.max(from, value)), from, to, LEFT, WIDTH - RIGHT);
    const y = (value) => scale(Math.min(1, Math.max(from, value)), from, 1, HEIGHT - BOTTOM, TOP);
    const parts = [];
    for (const tick of TICKS.filter((each) => each >= from && each <= to)) {
      parts.push(s("line", { class: "grid-line", x1: x(tick), x2: x(tick), y1: TOP, y2: HEIGHT - BOTTOM }), s("text", { x: x(tick), y: HEIGHT - BOTTOM + 12, "text-anchor": "middle" }, String(tick)));
      if (tick <= 1) parts.push(s("text", { x: LEFT - 6, y: y(tick) + 3.5, "text-anchor": "end" }, share(tick)));
    }
    parts.push(s("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, "FLOPs per byte, over those at the ridge"));
    parts.push(s("path", { class: "roof-line", d: `M${x(from)},${y(from)}L${x(1)},${y(1)}L${x(to)},${y(1)}` }));
    this.frame.replaceChildren(...parts);
    const make = () => s("circle", { class: "roof-point", r: 4.5 }, s("title", {}));
    keyed(this.points, points, (point) => point.id, make, (circle, point) => {
      for (const [name, value] of Object.entries({ "data-hue": point.role, cx: x(point.x), cy: y(point.y) })) circle.setAttribute(name, value);
      setText(circle.firstChild, point.text);
    });
    this.svg.setAttribute("aria-label", `Roofline: ${points.map((point) => point.text).join("; ") || "no steps in the last seconds"}`);
  }
}

function pointOf({ worker_id, role, mfu, mbu, ridge }) {
  const x = mfu / mbu;
  const intensity = ridge === null ? "" : `, ${count(x * ridge)} FLOPs per byte`;
  return { id: worker_id, role, x, y: mfu, text: `${workerName(worker_id, role)}: MFU ${share(mfu)}, MBU ${share(mbu)}${intensity}` };
}
