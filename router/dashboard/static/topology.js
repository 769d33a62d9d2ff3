// Draws the cluster: router, prefill workers, decode workers, and the flows between them.

import { keyed, s, setText } from "./dom.js";
import { bytes, count, seconds, words, workerName, workerPath } from "./format.js";

const NODE = { width: 214, height: 92, gap: 18 };
// Side by side: the router, then the pools. On a narrow screen the router is above them, and its wires go around.
const WIDE = { width: 1120, x: { router: 12, prefill: 292, decode: 818, single: 560 }, top: 44, leastHeight: 400 };
const NARROW = { width: 516, x: { router: 151, prefill: 18, decode: 284, single: 151 }, top: 176, leastHeight: 0 };
const ROUTER_Y = 36; // on a narrow screen
const DOT_GAP = 26;
const narrow = matchMedia("(max-width: 760px)");
const reduced = matchMedia("(prefers-reduced-motion: reduce)");

export class Topology {
  constructor(holder, onPick) {
    this.onPick = onPick;
    this.wires = s("g", { "aria-hidden": "true" });
    this.flows = s("g", {});
    this.nodes = s("g", {});
    this.heads = s("g", { "aria-hidden": "true" });
    this.svg = s("svg", { class: "topo", role: "group", "aria-label": "Topology of the cluster" }, this.wires, this.flows, this.heads, this.nodes);
    holder.append(this.svg);
    narrow.addEventListener("change", () => this.view && this.update(this.view));
  }

  update(view) {
    const prefill = view.workers.filter((worker) => worker.role === "prefill");
    const decode = view.workers.filter((worker) => worker.role !== "prefill");
    const rows = Math.max(1, prefill.length, decode.length);
    const { width, x, top, leastHeight } = (this.layout = narrow.matches ? NARROW : WIDE);
    const height = Math.max(leastHeight, top + rows * (NODE.height + NODE.gap) + 4);
    this.view = view;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const decodeX = prefill.length ? x.decode : x.single;
    this.places = new Map();
    place(this.places, prefill, x.prefill, top, height);
    place(this.places, decode, decodeX, top, height);
    const middle = narrow.matches ? ROUTER_Y + NODE.height / 2 : (height + top) / 2;
    this.drawHeads(prefill.length, decodeX);
    this.drawNodes(view, middle);
    this.drawWires(view, middle, prefill.length > 0);
    this.drawFlows(view);
  }

  drawHeads(prefills, decodeX) {
    const { x, top } = this.layout;
    const routerY = narrow.matches ? ROUTER_Y : top;
    const heads = [["Router", x.router, routerY], ...(prefills ? [["Prefill", x.prefill, top]] : []), ["Decode", decodeX, top]];
    keyed(this.heads, heads, ([name]) => name, ([name]) => s("text", { class: "column" }, name), (text, [, x, below]) => {
      text.setAttribute("x", x);
      text.setAttribute("y", below - 18);
    });
  }

  drawNodes(view, middle) {
    const routers = view.routers.length ? view.routers : [{ router_id: view.router_id, state: "ready" }];
    const own = routers.find((router) => router.router_id === view.router_id) ?? routers[0];
    const items = [{ key: "router", router: own, routers }, ...view.workers.map((worker) => ({ key: `worker ${worker.worker_id}`, worker }))];
    keyed(this.nodes, items, (item) => item.key, (item) => this.makeNode(item), (node, item) => {
      node._item = item;
      if (item.worker) updateWorker(node, item.worker, this.places.get(item.worker.worker_id), view.models.length > 1);
      else updateRouter(node, item, view, this.layout.x.router, middle);
    });
  }

  makeNode(item) {
    const role = item.worker ? item.worker.role : "router";
    const text = (name, x, y, extra = {}) => s("text", { class: name, x, y, ...extra });
    const node = s("g", { class: "node", tabindex: 0, role: "button", "data-role": role, "data-worker": item.worker?.worker_id },
      s("rect", { class: "box", width: NODE.width, height: NODE.height, rx: 12 }),
      s("rect", { class: "stripe", "data-role": role, x: 0, y: 14, width: 3.5, height: NODE.height - 28, rx: 2 }),
      s("circle", { class: "health", cx: NODE.width - 16, cy: 19, r: 4.5 }),
      text("name", 16, 24), text("fact one", 16, 42),
      s("g", { class: "blocks", transform: "translate(16 76)" }),
      text("fact two", 16, 60));
    const pick = () => this.onPick(node._item);
    node.addEventListener("click", pick);
    node.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(); }
    });
    return node;
  }

  drawWires(view, middle, hasPrefill) {
    const first = view.workers.filter((worker) => (hasPrefill ? worker.role === "prefill" : true));
    const { width, x } = this.layout;
    const from = { x: narrow.matches ? x.router : x.router + NODE.width, y: middle };
    const to = { x: narrow.matches ? x.router + NODE.width : width - 8, y: middle };
    const wires = first.map((worker) => {
      const at = this.places.get(worker.worker_id);
      return { key: `in ${worker.worker_id}`, path: routerWire(from, { x: at.x, y: at.y + NODE.height / 2 }, 0), kind: "feed", busy: busy(worker) };
    });
    for (const worker of view.workers.filter((each) => each.role !== "prefill")) {
      const at = this.places.get(worker.worker_id);
      const start = { x: at.x + NODE.width, y: at.y + NODE.height / 2 };
      wires.push({ key: `out ${worker.worker_id}`, path: routerWire(start, to, width), kind: "out", busy: worker.running_requests > 0 });
    }
    keyed(this.wires, wires, (wire) => wire.key,
      (wire) => s("g", {}, s("path", { class: "wire" }), s("path", { class: `dots ${wire.kind}`, "stroke-width": 3, "stroke-dasharray": `0.1 ${DOT_GAP}` })),
      (group, wire) => {
        for (const path of group.children) path.setAttribute("d", wire.path);
        run(group.lastChild, wire.busy ? 1 : 0);
      });
  }

  drawFlows(view) {
    const known = view.flows.filter((flow) => this.places.has(flow.prefill_worker) && this.places.has(flow.decode_worker));
    const shown = known.length > 24 ? null : known;
    keyed(this.flows, known, (flow) => `${flow.prefill_worker} ${flow.decode_worker}`, makeFlow, (group, flow) => {
      updateFlow(group, flow, this.places, view.rates.handoff_bytes_per_s, shown !== null && !narrow.matches);
    });
  }
}

function place(places, workers, x, top, height) {
  const used = workers.length * (NODE.height + NODE.gap) - NODE.gap;
  const first = top + (height - top - used) / 2;
  workers.forEach((worker, row) => places.set(worker.worker_id, { x, y: first + row * (NODE.height + NODE.gap) }));
}

// Between the router and a worker. On a narrow screen it leaves and arrives by the side at `edge`.
function routerWire(from, to, edge) {
  return narrow.matches ? `M${from.x},${from.y} C${edge},${from.y} ${edge},${to.y} ${to.x},${to.y}` : curve(from, to);
}

function curve(from, to) {
  const bend = Math.max(narrow.matches ? 0 : 40, (to.x - from.x) * 0.5);
  return `M${from.x},${from.y} C${from.x + bend},${from.y} ${to.x - bend},${to.y} ${to.x},${to.y}`;
}

const busy = (worker) => worker.running_requests + worker.waiting_requests + worker.reserved_requests > 0;

function updateRouter(node, { router, routers }, view, x, middle) {
  const more = routers.length > 1 ? `  +${routers.length - 1}` : "";
  node.setAttribute("transform", `translate(${x} ${middle - NODE.height / 2})`);
  node.setAttribute("aria-label", `${view.router_id}, ${view.ready ? "ready" : "not ready"}, ${view.queued_requests} queued, ${view.running_requests} on workers`);
  node.dataset.busy = view.running_requests > 0;
  setText(node.querySelector(".name"), view.router_id + more);
  setText(node.querySelector(".one"), `${count(view.rates.requests_per_s)} requests/s`);
  setText(node.querySelector(".two"), `${view.queued_requests} queued · ${view.running_requests} on workers`);
  node.querySelector(".health").dataset.health = view.ready ? "healthy" : "ejected";
  node.dataset.state = router.state === "failed" ? "down" : "up";
}

function updateWorker(node, worker, at, showModel) {
  const isUp = worker.state === "ready";
  node.setAttribute("transform", `translate(${at.x} ${at.y})`);
  node.setAttribute("aria-label", `${worker.worker_id}, ${worker.role}, ${words(worker.state)}, ${worker.health ?? "health unknown"}, ${worker.running_requests} running`);
  node.dataset.state = isUp ? "up" : "down";
  node.dataset.role = node.querySelector(".stripe").dataset.role = worker.role; // it may change
  node.dataset.busy = busy(worker);
  const name = workerName(worker.worker_id, worker.role);
  setText(node.querySelector(".name"), name.length > 24 ? `${name.slice(0, 23)}…` : name);
  setText(node.querySelector(".one"), isUp ? workerFacts(worker, showModel) : `${words(worker.state)} ${worker.reason}`.slice(0, 34));
  setText(node.querySelector(".two"), isUp ? blockFacts(worker.blocks) : "");
  node.querySelector(".health").dataset.health = isUp ? worker.health ?? "unknown" : "down";
  const total = Math.max(1, worker.blocks.total);
  let x = 0;
  const pieces = ["in_use", "leased", "cached", "free"].map((name) => {
    const width = (worker.blocks[name] / total) * (NODE.width - 32);
    x += width;
    return { name, x: x - width, width };
  });
  keyed(node.querySelector(".blocks"), pieces, (piece) => piece.name, (piece) => s("rect", { "data-block": piece.name, height: 7, rx: 1.5 }),
    (rect, piece) => { rect.setAttribute("x", piece.x); rect.setAttribute("width", Math.max(0, piece.width)); });
}

function workerFacts(worker, showModel) {
  const parts = [`${worker.running_requests} running`];
  if (worker.waiting_requests) parts.push(`${worker.waiting_requests} waiting`);
  if (worker.tp > 1) parts.push(`tp ${worker.tp}`);
  if (showModel) parts.push(worker.model.slice(0, 14));
  else if (worker.tpot_s) parts.push(`${seconds(worker.tpot_s)} per token`);
  else if (worker.prefill_tokens_per_s) parts.push(`${count(worker.prefill_tokens_per_s)} tok/s`);
  return parts.join(" · ");
}

const percent = (part) => `${Math.round(100 * part)} %`;

function blockFacts({ in_use, leased, cached, total }) {
  const busy = total ? (in_use + leased) / total : 0;
  return `${percent(busy)} busy · ${percent(total ? cached / total : 0)} cached of ${count(total)}`;
}

function makeFlow(flow) {
  const title = s("title", {});
  return s("g", { class: "flow", "data-flow": `${flow.prefill_worker} ${flow.decode_worker}`, role: "img" },
    title, s("path", { class: "wire" }), s("path", { class: "pipe" }), s("path", { class: "dots kv" }), s("text", { class: "flow-label", "text-anchor": "middle" }));
}

// The pipe's width follows the bytes per second, on a logarithmic scale; the dots' size and speed follow it.
function updateFlow(group, flow, places, allBytesPerS, withLabel) {
  const from = places.get(flow.prefill_worker), to = places.get(flow.decode_worker);
  const path = curve({ x: from.x + NODE.width, y: from.y + NODE.height / 2 }, { x: to.x, y: to.y + NODE.height / 2 });
  const [title, wire, pipe, dots, label] = group.children;
  const rate = flow.bytes_per_s >= 1 ? flow.bytes_per_s : 0;
  const level = rate ? Math.min(1, Math.max(0.12, Math.log10(rate / 1e3) / 7)) : 0;
  for (const each of [wire, pipe, dots]) each.setAttribute("d", path);
  wire.dataset.state = flow.state ?? "";
  pipe.setAttribute("stroke-width", 2 + 20 * level);
  pipe.setAttribute("opacity", rate ? 0.1 + 0.16 * level : 0);
  dots.setAttribute("stroke-width", 3.5 + 4.5 * level);
  dots.setAttribute("stroke-dasharray", `0.1 ${DOT_GAP}`);
  group.dataset.bytesPerS = Math.round(rate);
  const text = `${workerPath(flow)}: ${bytes(rate)}/s, ${flow.in_flight} in flight, ${count(flow.handoffs)} handoffs, ${bytes(flow.bytes)}`
    + (flow.transport ? `, ${flow.transport} ${flow.state}` : "") + (flow.latency_s ? `, ${seconds(flow.latency_s)} latency` : "");
  setText(title, text);
  group.setAttribute("aria-label", text);
  setText(label, withLabel && rate > 0.02 * allBytesPerS && rate >= 1e3 ? `${bytes(rate)}/s` : "");
  // Labels are not all in the middle, because crossing flows would overlap.
  const part = from.y === to.y ? 0.42 : 0.72;
  const at = bezierY(from.y, to.y, part) + NODE.height / 2;
  label.setAttribute("x", from.x + NODE.width + part * (to.x - from.x - NODE.width));
  label.setAttribute("y", at - 12 - 8 * level);
  run(dots, level);
}

const bezierY = (from, to, at) => from + (to - from) * at * at * (3 - 2 * at);

// One endless animation per path with a variable rate, so the dots never jump.
function run(path, level) {
  path.setAttribute("opacity", level ? 1 : 0);
  path._motion ??= path.animate({ strokeDashoffset: [0, -100 * (DOT_GAP + 0.1)] }, { duration: 100_000, iterations: Infinity });
  if (reduced.matches || !level) path._motion.pause();
  else {
    path._motion.updatePlaybackRate(1.5 + 4 * level);
    if (path._motion.playState !== "running") path._motion.play();
  }
}
