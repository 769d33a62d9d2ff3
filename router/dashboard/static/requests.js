// The table of requests: filtered, sorted, rows kept in place on updates.

import { byId, h, keyed, setText } from "./dom.js";
import { bytes, clock, count, seconds, words, workerPath } from "./format.js";

const ENDS = { finished: "good", rejected: "warning", cancelled: "quiet", failed: "bad" };
const COLUMNS = [
  { name: "request_id", title: "Request", text: (row) => row.request_id },
  { name: "state", title: "State", text: (row) => words(row.error || row.state) },
  { name: "path", title: "Path", text: pathOf },
  { name: "received_unix_s", title: "Received", text: (row) => clock(row.received_unix_s) },
  { name: "prompt_tokens", title: "Prompt", text: (row) => count(row.prompt_tokens) },
  { name: "cached_tokens", title: "Cached", text: (row) => count(row.cached_tokens) },
  { name: "completion_tokens", title: "Output", text: (row) => count(row.completion_tokens) },
  { name: "ttft_s", title: "TTFT", text: (row) => seconds(row.ttft_s) },
  { name: "total_s", title: "Total", text: (row) => seconds(row.total_s) },
  { name: "handoff_bytes", title: "KV moved", text: (row) => (row.handoff_bytes ? bytes(row.handoff_bytes) : "–") },
];

export function pathOf(row) {
  if (!row.decode_worker) return "–";
  const way = workerPath(row);
  return row.attempts > 1 ? `${way} (${row.attempts} attempts)` : way;
}

export const toneOf = (row) => ENDS[row.state] ?? "running";

export class Requests {
  constructor(onPick) {
    this.onPick = onPick;
    this.table = byId("requests");
    this.filter = byId("filter");
    this.sort = null; // the router's order: running first, then the latest
    this.rows = [];
    this.filter.addEventListener("input", () => this.draw());
    this.table.tHead.append(h("tr", {}, COLUMNS.map((column) => h("th", { scope: "col", "data-column": column.name }, h("button", { type: "button", onclick: () => this.sortBy(column.name) }, column.title)))));
  }

  sortBy(name) {
    if (this.sort?.name !== name) this.sort = { name, descending: true };
    else if (this.sort.descending) this.sort = { name, descending: false };
    else this.sort = null;
    for (const head of this.table.tHead.rows[0].cells) {
      const own = this.sort && head.dataset.column === this.sort.name;
      if (own) head.setAttribute("aria-sort", this.sort.descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
    this.draw();
  }

  update(view) {
    this.rows = view.requests;
    this.draw();
  }

  draw() {
    const shown = this.sorted(this.rows.filter((row) => matches(row, this.filter.value)));
    keyed(this.table.tBodies[0], shown, (row) => row.request_id, (row) => this.make(row), update);
    const none = byId("no-requests");
    none.hidden = shown.length > 0;
    setText(none, this.rows.length ? "No request matches the filter." : "This router has received no requests yet.");
  }

  sorted(rows) {
    if (!this.sort) return rows;
    const { name, descending } = this.sort;
    const value = name === "path" ? pathOf : (row) => row[name];
    const order = (a, b) => (typeof a === "string" ? a.localeCompare(b) : (a ?? -1) - (b ?? -1));
    return rows.toSorted((a, b) => (descending ? -1 : 1) * order(value(a), value(b)));
  }

  make(row) {
    const pick = () => this.onPick(row.request_id);
    const cells = COLUMNS.map((column) => {
      if (column.name === "request_id") return h("td", {}, h("button", { type: "button", onclick: (event) => { event.stopPropagation(); pick(); } }, row.request_id));
      if (column.name === "state") return h("td", {}, h("span", { class: "state" }));
      return h("td");
    });
    return h("tr", { onclick: pick }, cells);
  }
}

function update(line, row) {
  COLUMNS.forEach((column, index) => {
    if (column.name === "request_id") return;
    const cell = line.cells[index];
    if (column.name === "state") cell.firstChild.dataset.tone = toneOf(row);
    setText(column.name === "state" ? cell.firstChild : cell, column.text(row));
  });
}

function matches(row, filter) {
  const found = `${row.request_id} ${row.model} ${row.state} ${row.error} ${pathOf(row)}`.toLowerCase();
  return filter.toLowerCase().split(/\s+/).every((word) => found.includes(word));
}
