// The cards around the topology: tiles, queues, ratio, cache, placements, events.

import { Chart, sparkline } from "./charts.js";
import { h, keyed, s, setText } from "./dom.js";
import { ago, clock, count, parts, seconds, share, words, workerPath } from "./format.js";

const TILES = [
  { name: "requests", title: "Requests", unit: "/s", hue: "prefill", value: (view) => parts.count(view.rates.requests_per_s), line: (view) => perSecond(view.history.requests, view),
    more: (view) => `${view.running_requests} on workers, ${view.queued_requests} queued` },
  { name: "tokens", title: "Output tokens", unit: "/s", hue: "decode", value: (view) => parts.count(view.rates.output_tokens_per_s), line: (view) => perSecond(view.history.output_tokens, view),
    more: (view) => `${count(view.rates.prompt_tokens_per_s)}/s prompt tokens` },
  { name: "ttft", title: "TTFT p50", hue: "prefill", value: (view) => parts.seconds(view.latency[0].ttft.p50), line: (view) => view.history.ttft.p50,
    more: (view) => `p99 ${seconds(view.latency[0].ttft.p99)}, last minute` },
  { name: "itl", title: "ITL p50", hue: "decode", value: (view) => parts.seconds(view.latency[0].itl.p50), line: (view) => view.history.itl.p50,
    more: (view) => `p99 ${seconds(view.latency[0].itl.p99)}, last minute` },
  { name: "kv", title: "KV handed off", unit: "/s", hue: "kv", value: (view) => parts.bytes(kvRate(view)), line: (view) => perSecond(view.history.handoff_bytes, view),
    more: (view) => `${count(view.rates.handoffs_per_s)} handoffs/s, ${view.flows.reduce((sum, flow) => sum + flow.in_flight, 0)} in flight` },
  { name: "hits", title: "Cache hits", hue: "kv", value: (view) => parts.share(view.cache.hit_share), line: (view) => view.cache.hit_share_history,
    more: () => "of prompt tokens, 5 min" },
  { name: "errors", title: "Not finished", unit: "/s", hue: "warn", value: (view) => parts.count(view.rates.not_finished_per_s), line: (view) => perSecond(view.history.not_finished, view),
    more: () => "refused, failed or cancelled" },
];

const kvRate = (view) => view.rates.handoff_bytes_per_s;

// The rate in each slice of the history. The last slice is open: null while it covers less than a second.
export function perSecond(counts, { history, taken_unix_s }) {
  const openS = taken_unix_s - history.last_unix_s;
  return counts.map((number, slot) => (slot < counts.length - 1 ? number / history.slice_s : openS < 1 ? null : number / openS));
}

export class Tiles {
  constructor(holder) {
    this.tiles = TILES.map((tile) => {
      const parts = { value: h("span", {}), unit: h("span", { class: "unit" }), more: h("div", { class: "more" }), spark: s("svg", { "aria-hidden": "true" }) };
      holder.append(h("article", { class: "card tile", "data-tile": tile.name }, h("h3", {}, tile.title), h("div", { class: "value" }, parts.value, parts.unit), parts.more, h("div", { "data-hue": tile.hue }, parts.spark)));
      return { ...tile, parts };
    });
  }

  update(view) {
    for (const { parts: at, value, unit, more, line } of this.tiles) {
      const [number, scale] = value(view);
      setText(at.value, number);
      setText(at.unit, number === "–" ? "" : scale + (unit ?? ""));
      setText(at.more, more(view));
      sparkline(at.spark, line(view));
    }
  }
}

export class LatencyCharts {
  constructor(holder) {
    this.charts = [["ttft", "TTFT"], ["tpot", "TPOT"], ["itl", "ITL"], ["e2e", "End to end"]].map(([name, title]) => {
      const lines = [50, 90, 99].map((at) => ({ name: `p${at}`, key: `k${at}`, label: `p${at}` }));
      const chart = new Chart(title, lines, seconds);
      chart.element.className = "card";
      chart.element.dataset.chart = name;
      holder.append(chart.element);
      return [name, chart];
    });
  }

  update(view) {
    for (const [name, chart] of this.charts) {
      const { p50, p90, p99 } = view.history[name];
      const { window_s, [name]: latest } = view.latency[1];
      chart.update(view.history, [p50, p90, p99], [latest.p50, latest.p90, latest.p99], `last ${Math.round(window_s / 60)} min`);
    }
  }
}

export class Throughput {
  constructor(holder) {
    const lines = [{ name: "line-a", key: "k50", label: "output" }, { name: "line-b", key: "k90", label: "prompt" }];
    this.chart = new Chart(null, lines, count, { area: true });
    holder.append(this.chart.element);
  }

  update(view) {
    const { history, rates } = view;
    const lines = [perSecond(history.output_tokens, view), perSecond(history.prompt_tokens, view)];
    this.chart.update(history, lines, [rates.output_tokens_per_s, rates.prompt_tokens_per_s], `last ${Math.round(rates.window_s)} s`);
  }
}

function bars(holder, items) {
  keyed(holder, items, (item) => item.name,
    (item) => h("div", { class: "bar", "data-hue": item.hue }, h("div", { class: "row" }, h("span", { class: "label" }, item.label ?? words(item.name)), h("span", { class: "grow" }), h("b", { class: "number" }), h("span", { class: "soft small extra" })),
      h("div", { class: "track" }, h("div", { class: "fill" }))),
    (bar, item) => {
      setText(bar.querySelector(".number"), item.text);
      setText(bar.querySelector(".extra"), item.extra ?? "");
      bar.querySelector(".track").hidden = item.share === null;
      bar.querySelector(".fill").style.width = `${Math.round(1000 * Math.min(1, item.share || 0)) / 10}%`;
    });
}

export function drawQueues(holder, view) {
  const most = Math.max(8, ...view.queues.map((queue) => queue.queued));
  bars(holder, view.queues.map((queue) => {
    const refused = Object.values(queue.refusals).reduce((sum, each) => sum + each, 0);
    return { name: queue.name, label: queue.name, hue: queue.is_batch ? "kv" : "prefill", text: `${queue.queued} waiting`, share: queue.queued / most,
      extra: refused ? `· ${count(refused)} refused` : queue.ttft_slo_s ? `· TTFT ≤ ${seconds(queue.ttft_slo_s)}` : "" };
  }));
}

export function drawRatio(holder, view) {
  const { prefill_ready, prefill_total, decode_ready, decode_total, autoscaler, decisions } = view.scaling;
  const load = (role) => {
    const workers = view.workers.filter((worker) => worker.role === role && worker.state === "ready" && worker.blocks.total);
    const used = workers.reduce((sum, { blocks }) => sum + (blocks.in_use + blocks.leased) / blocks.total, 0);
    return workers.length ? used / workers.length : 0;
  };
  bars(holder, [
    { name: "prefill", hue: "prefill", text: `${prefill_ready} of ${prefill_total} ready`, extra: `· ${share(load("prefill"))} of KV in use`, share: load("prefill") },
    { name: "decode", hue: "decode", text: `${decode_ready} of ${decode_total} ready`, extra: `· ${share(load("decode"))} of KV in use`, share: load("decode") },
    { name: "autoscaler", hue: "kv", text: decisions.length ? decisions[0].text : autoscaler, share: null, extra: autoscaler === "off" ? "· ratio set by hand" : decisions.length ? `· ${ago(decisions[0].last_unix_s, view.taken_unix_s)}` : "" },
  ]);
}

export function drawPlacements(holder, view) {
  const found = Object.entries(view.placements).sort(([, a], [, b]) => b - a);
  const all = found.reduce((sum, [, number]) => sum + number, 0);
  if (!found.length) found.push(["no requests placed yet", null]);
  bars(holder, found.map(([name, number]) => ({ name, hue: name.startsWith("handoff") ? "kv" : "decode", text: number === null ? "" : count(number), extra: number === null ? "" : share(number / all), share: number / all })));
}

export class CacheCard {
  constructor(holder) {
    const length = 2 * Math.PI * 46;
    this.length = length;
    this.arc = s("circle", { class: "arc", cx: 60, cy: 60, r: 46, transform: "rotate(-90 60 60)", "stroke-dasharray": `0 ${length}` });
    this.text = s("text", { x: 60, y: 67 }, "–");
    this.gauge = s("svg", { viewBox: "0 0 120 120", role: "img" }, s("circle", { class: "ring", cx: 60, cy: 60, r: 46 }), this.arc, this.text);
    this.facts = h("dl", { class: "facts" });
    this.spark = s("svg", { class: "spark", "aria-hidden": "true" });
    holder.append(h("div", { class: "gauge" }, this.gauge, this.facts), h("div", { "data-hue": "decode" }, this.spark));
  }

  update({ cache }) {
    this.arc.setAttribute("stroke-dasharray", `${(cache.hit_share ?? 0) * this.length} ${this.length}`);
    this.arc.setAttribute("opacity", cache.hit_share ? 1 : 0);
    setText(this.text, share(cache.hit_share));
    this.gauge.setAttribute("aria-label", `Hit share ${share(cache.hit_share)}`);
    facts(this.facts, [
      ["Index", `${count(cache.index_blocks)} blocks of ${cache.index_workers} workers`],
      ["Wrong predictions", share(cache.wrong_credit_share)],
      ["Did not fit", cache.lost_blocks ? `${count(cache.lost_blocks)} blocks (memory)` : "none"],
      ["Redis", cache.redis === "down" ? "down: entries expire" : cache.redis],
    ]);
    sparkline(this.spark, cache.hit_share_history);
  }
}

export function facts(list, pairs) {
  keyed(list, pairs.flatMap(([name, value]) => [["dt", name, name], ["dd", name, value]]), ([tag, name]) => `${tag} ${name}`, ([tag]) => h(tag), (element, [, , text]) => setText(element, text));
}

export function drawEvents(list, view) {
  keyed(list, view.events, (event) => `${event.first_unix_s} ${event.subject} ${event.text}`,
    () => h("li", {}, h("span", { class: "what" }), h("time")),
    (item, event) => {
      item.dataset.tone = event.severity;
      setText(item.firstChild, `${event.subject} ${event.text}${event.times > 1 ? ` ×${event.times}` : ""}`.trim());
      setText(item.lastChild, ago(event.last_unix_s, view.taken_unix_s));
      item.title = `${words(event.kind)}, ${clock(event.last_unix_s)}`;
    });
  empty(list, view.events.length, "No events yet.");
}

export function drawDecisions(list, view, onPick) {
  keyed(list, view.decisions, (decision) => `${decision.request_id} ${decision.at_unix_s}`,
    (decision) => h("li", { "data-tone": decision.prefill_worker ? "info" : "good" },
      h("span", { class: "what" }, workerPath(decision, ", local prefill"), h("br"),
        h("span", { class: "soft" }, `${words(decision.reason)} · ${count(decision.prompt_tokens)} tokens, ${count(decision.cached_tokens)} cached `),
        h("button", { type: "button", onclick: () => onPick(decision.request_id) }, "timeline")),
      h("time")),
    (item, decision) => setText(item.lastChild, ago(decision.at_unix_s, view.taken_unix_s)));
  empty(list, view.decisions.length, "No requests placed yet.");
}

function empty(list, length, text) {
  list.nextElementSibling?.classList.contains("empty") || list.after(h("p", { class: "empty" }, text));
  list.nextElementSibling.hidden = length > 0;
}
