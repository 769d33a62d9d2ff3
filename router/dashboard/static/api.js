// The dashboard's API client. It sends the user's key as a header and keeps it in this tab only.

const KEY = "tandem-dashboard-key";
const TIMEOUT_MS = 8000;

export class NeedsKey extends Error {}
export class Refused extends Error {}
export class Unknown extends Error {}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

async function get(path) {
  const headers = key.get() ? { authorization: `Bearer ${key.get()}` } : {};
  const reply = await fetch(`api/v1/${path}`, { headers, cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (reply.ok) return reply.json();
  const message = await reply.json().then((body) => body?.error?.message, () => null);
  if (reply.status === 401) throw new NeedsKey(message ?? "an API key is required");
  if (reply.status === 403) throw new Refused(message ?? "this key has no access to the dashboard");
  if (reply.status === 404) throw new Unknown(message ?? "not found");
  throw new Error(message ?? `the router returned ${reply.status}`);
}

export const snapshot = () => get("snapshot");
export const request = (id) => get(`requests/${encodeURIComponent(id)}`);
