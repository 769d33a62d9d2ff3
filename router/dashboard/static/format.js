// Formats numbers with three significant digits and a unit.

function scaled(value, units) {
  for (const [size, unit, from = size] of units) if (Math.abs(value) >= from) return [digits(value / size), unit];
  const [size, unit] = units.at(-1);
  return [digits(value / size), unit];
}

function digits(value) {
  const size = Math.abs(value);
  if (size >= 100 || value === 0) return value.toFixed(0);
  return size >= 10 ? value.toFixed(1) : value.toFixed(2);
}

const SECONDS = [[86400, "d"], [3600, "h"], [60, "min", 120], [1, "s"], [1e-3, "ms"], [1e-6, "µs"]];
const BYTES = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];
const COUNTS = [[1e9, "G"], [1e6, "M"], [1e4, "k"], [1, ""]];

export const parts = {
  seconds: (value) => (value === null || value === undefined ? ["–", ""] : scaled(value, SECONDS)),
  bytes: (value) => (value === null || value === undefined ? ["–", ""] : scaled(value, BYTES)),
  count: (value) => {
    if (value === null || value === undefined) return ["–", ""];
    return Number.isInteger(value) && value < 1e4 ? [String(value), ""] : scaled(value, COUNTS);
  },
  share: (value) => (value === null || value === undefined ? ["–", ""] : [digits(100 * value), "%"]),
};

export const seconds = (value) => parts.seconds(value).join(" ").trim();
export const bytes = (value) => parts.bytes(value).join(" ").trim();
export const count = (value) => parts.count(value).join("");
export const share = (value) => parts.share(value).join(" ").trim();
export const words = (name) => name.replaceAll("_", " ");

// The id, and the role if the id names the other one, as after a role change: "prefill-1 (decode)".
export function workerName(id, role) {
  const named = /(?:^|-)(prefill|decode)-[^-]*$/.exec(id)?.[1] ?? role;
  return named === role ? id : `${id} (${role})`;
}

// "prefill-0 → decode-0". Without a prefill worker: the decode worker and `local`.
export function workerPath({ prefill_worker, decode_worker }, local = "") {
  const decode = workerName(decode_worker, "decode");
  return prefill_worker ? `${workerName(prefill_worker, "prefill")} → ${decode}` : decode + local;
}

export function clock(unixS) {
  return new Date(unixS * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
}

export function ago(unixS, nowUnixS) {
  const past = Math.max(0, nowUnixS - unixS);
  if (past < 1.5) return "now";
  if (past < 90) return `${Math.round(past)} s ago`;
  if (past < 5400) return `${Math.round(past / 60)} min ago`;
  return clock(unixS);
}
