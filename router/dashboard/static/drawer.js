// The side panel with the details of one request, worker or router.

import * as api from "./api.js";
import { facts } from "./cards.js";
import { byId, h, s } from "./dom.js";
import { bytes, clock, count, parts, seconds, share, words, workerName, workerPath } from "./format.js";
import { pathOf } from "./requests.js";

const WIDTH = 800, ROW = 26, LEFT = 92, RIGHT = 74, TOP = 22;
const FOLLOW_MS = 1000;

export class Drawer {
  constructor() {
    this.dialog = byId("drawer");
    this.title = byId("drawer-title");
    this.body = byId("drawer-body");
    byId("drawer-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => { this.shown = null; clearTimeout(this.timer); });
    this.dialog.addEventListener("click", (event) => { if (event.target === this.dialog) this.dialog.close(); });
  }

  open(title, ...body) {
    this.title.textContent = title;
    this.body.replaceChildren(...body);
    if (!this.dialog.open) this.dialog.showModal();
  }

  async request(id) {
    this.shown = id;
    clearTimeout(this.timer);
    if (!this.dialog.open) this.open(id, h("p", { class: "soft" }, "Loading…"));
    try {
      const found = await api.request(id);
      if (this.shown !== id) return;
      this.open(id, requestFacts(found.request), ...found.attempts.map((attempt, index) => attemptView(attempt, index, found)));
      const isOver = ["finished", "rejected", "cancelled", "failed"].includes(found.request.state);
      if (!isOver) this.timer = setTimeout(() => this.request(id), FOLLOW_MS);
    } catch (error) {
      if (this.shown !== id) return;
      const text = error instanceof api.Unknown ? "This router no longer has this request: it keeps only the latest finished ones." : error.message;
      this.open(id, h("p", { class: "error" }, text));
    }
  }

  worker(worker) {
    this.shown = null;
    this.open(workerName(worker.worker_id, worker.role), list([
      ["Role", worker.role], ["Model", worker.model], ["State", words(worker.state)], ...(worker.reason ? [["Reason", worker.reason]] : []),
      ["Health", worker.health ?? "this router has no link to it"], ["Epoch", worker.epoch], ["Restarts", String(worker.restarts)], ["Tensor parallel", String(worker.tp)],
      ["Requests", `${worker.running_requests} running, ${worker.waiting_requests} waiting, ${worker.reserved_requests} reserved`],
      ["Waiting tokens", count(worker.waiting_tokens)],
      ["KV blocks", `${worker.blocks.in_use} in use, ${worker.blocks.leased} leased, ${worker.blocks.cached} cached, ${worker.blocks.free} free of ${worker.blocks.total}`],
      ...(worker.prefill_tokens_per_s ? [["Prefill pace", `${count(worker.prefill_tokens_per_s)} tokens/s`]] : []),
      ...(worker.tpot_s ? [["Time per token", seconds(worker.tpot_s)]] : []),
      ...(worker.mfu === null ? [] : [["Of the peaks", `${share(worker.mfu)} of FLOP/s (MFU), ${share(worker.mbu)} of memory bandwidth (MBU)`]]),
    ]));
  }

  router(view) {
    this.shown = null;
    this.open("Routers", ...view.routers.map((router) => list([
      ["Router", router.router_id + (router.router_id === view.router_id ? " (this one)" : "")], ["State", words(router.state)], ["Restarts", String(router.restarts)], ["HTTP", router.http_address || "–"],
    ])));
  }
}

function list(pairs) {
  const found = h("dl", { class: "facts" });
  facts(found, pairs);
  return found;
}

function requestFacts(row) {
  return list([
    ["Model", row.model], ["State", words(row.state) + (row.error ? ` (${words(row.error)})` : "")], ["Received", clock(row.received_unix_s)], ["Path", pathOf(row)],
    ["Prompt", `${count(row.prompt_tokens)} tokens, ${count(row.cached_tokens)} cached`], ["Output", `${count(row.completion_tokens)} tokens`],
    ["TTFT", seconds(row.ttft_s)], ["Total", seconds(row.total_s)],
  ]);
}

function attemptView(attempt, index, found) {
  const way = workerPath(attempt, ", without a handoff");
  const title = found.attempts.length > 1 ? `Attempt ${index + 1}: ${way}` : way;
  const notes = [];
  if (attempt.bytes) notes.push(`${bytes(attempt.bytes)} moved in ${attempt.pieces} pieces, ${attempt.blocks} blocks.`);
  if (attempt.overlap_share !== null) notes.push(`${share(attempt.overlap_share)} of the bytes had arrived when the last layer was computed.`);
  if (attempt.exposed_s !== null) notes.push(`${seconds(attempt.exposed_s)} from the last layer to the decode batch.`);
  const error = attempt.error ? h("p", { class: "error" }, `${words(attempt.error)}${attempt.cause ? ` (${words(attempt.cause)})` : ""}: ${attempt.message}`) : null;
  return h("section", { class: "attempt" }, h("h2", {}, title), attempt.spans.length ? gantt(attempt.spans) : null, ...notes.map((note) => h("p", { class: "note" }, note)), error ?? "");
}

// As in `tandem trace`, the axis covers the stages between queue and decode; those two are cut at its ends.
export function axisOf(spans) {
  const inner = spans.filter((span) => span.stage !== "queue" && span.stage !== "decode");
  const used = inner.length ? inner : spans;
  const start = Math.min(...used.map((span) => span.start_s)), end = Math.max(...used.map((span) => span.end_s));
  const margin = Math.max(1e-6, 0.06 * (end - start));
  return [Math.max(0, start - margin), end + margin];
}

function gantt(spans) {
  const [start, end] = axisOf(spans);
  const x = (at) => LEFT + (Math.min(end, Math.max(start, at)) - start) / (end - start) * (WIDTH - LEFT - RIGHT);
  const height = TOP + spans.length * ROW + 4;
  const svg = s("svg", { class: "gantt", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": spans.map((span) => `${words(span.stage)} from ${seconds(span.start_s)} for ${seconds(span.end_s - span.start_s)}`).join(", ") });
  for (let tick = 0; tick <= 4; tick += 1) {
    const at = start + (tick / 4) * (end - start);
    svg.append(s("line", { class: "grid-line", x1: x(at), x2: x(at), y1: TOP - 4, y2: height }), s("text", { class: "tick", x: x(at), y: 12, "text-anchor": "middle" }, `${parts.seconds(at).join(" ")}`));
  }
  spans.forEach((span, row) => svg.append(...bar(span, TOP + row * ROW, x, start, end)));
  return svg;
}

function bar(span, y, x, start, end) {
  const shape = s("rect", { class: "span", "data-stage": span.stage, x: x(span.start_s), y: y + 4, width: Math.max(2, x(span.end_s) - x(span.start_s)), height: ROW - 10 });
  shape.append(s("title", {}, `${words(span.stage)}: ${seconds(span.start_s)} to ${seconds(span.end_s)}`));
  const cut = `${span.start_s < start ? "◂ " : ""}${seconds(span.end_s - span.start_s)}${span.end_s > end ? " ▸" : ""}`;
  return [s("text", { x: 0, y: y + 15 }, words(span.stage)), shape, s("text", { class: "took", x: WIDTH, y: y + 15, "text-anchor": "end" }, cut)];
}
