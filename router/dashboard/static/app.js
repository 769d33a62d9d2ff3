// Fetches a snapshot once a second and updates the parts. Fetches nothing while the page is hidden or paused.

import * as api from "./api.js";
import { CacheCard, LatencyCharts, Throughput, Tiles, drawDecisions, drawEvents, drawPlacements, drawQueues, drawRatio } from "./cards.js";
import { byId, setText } from "./dom.js";
import { Drawer } from "./drawer.js";
import { seconds } from "./format.js";
import { Requests } from "./requests.js";
import { Roofline } from "./roofline.js";
import { Topology } from "./topology.js";

const VERSION = 1;
const EVERY_MS = 1000;
const SLOWEST_MS = 15000;
const THEME = "tandem-dashboard-theme";

let paused = false;
let view = null;
let failures = 0;
let timer = null;
let asking = false;
let signedOut = false;

const drawer = new Drawer();
const pickRequest = (id) => drawer.request(id);
const topology = new Topology(byId("topology"), (item) => (item.worker ? drawer.worker(item.worker) : drawer.router(view)));
const tiles = new Tiles(byId("tiles"));
const latency = new LatencyCharts(byId("latency"));
const throughput = new Throughput(byId("throughput"));
const cache = new CacheCard(byId("cache"));
const roofline = new Roofline(byId("roofline"));
const requests = new Requests(pickRequest);

function show(state) {
  document.body.dataset.view = state;
}

function setStatus(state, text) {
  byId("live").dataset.state = state;
  setText(byId("live"), text);
  document.body.dataset.stale = String(state === "lost" && view !== null);
}

function banner(text) {
  byId("banner").hidden = !text;
  setText(byId("banner"), text ?? "");
}

function draw() {
  document.title = `${view.cluster} · Tandem`;
  setText(byId("cluster"), view.cluster);
  setText(byId("ready"), view.ready ? "ready" : "not ready");
  byId("ready").dataset.tone = view.ready ? "good" : "bad";
  const several = view.routers.length > 1 ? ` of ${view.routers.length} routers: requests, flows and latencies of this router only` : "";
  setText(byId("routers"), view.router_id + several);
  setText(byId("uptime"), `v${view.tandem} · up ${seconds(view.up_s)}`);
  for (const part of [topology, tiles, latency, throughput, cache, roofline, requests]) part.update(view);
  drawQueues(byId("queues"), view);
  drawRatio(byId("ratio"), view);
  drawPlacements(byId("placements"), view);
  drawEvents(byId("events"), view);
  drawDecisions(byId("decisions"), view, pickRequest);
  banner(view.workers.length ? (view.controller ? null : "The controller does not answer: other routers and workers that are not ready are missing here.") : "No worker has joined this router yet.");
}

async function look() {
  clearTimeout(timer);
  if (asking || paused || signedOut || document.hidden) return;
  asking = true;
  let delayMs = EVERY_MS;
  try {
    const found = await api.snapshot();
    if (signedOut) return;
    if (found.version !== VERSION) throw new Error(`this page supports snapshot version ${VERSION}, but the router sent ${found.version}: reload the page`);
    view = found;
    failures = 0;
    show("main");
    byId("leave").hidden = !api.key.get();
    draw();
    if (!paused) setStatus("live", "live");
  } catch (error) {
    if (signedOut) return;
    delayMs = failed(error);
  } finally {
    asking = false;
  }
  if (delayMs !== null) timer = setTimeout(look, delayMs);
}

// Returns the delay until the next try; null: wait for a sign-in, or for the end of the pause.
function failed(error) {
  if (error instanceof api.NeedsKey || error instanceof api.Refused) {
    signIn(error instanceof api.Refused ? error.message : api.key.get() ? "This key is not accepted." : "");
    return null;
  }
  if (paused) return null;
  failures += 1;
  const delayMs = Math.min(SLOWEST_MS, EVERY_MS * 2 ** Math.min(failures - 1, 5));
  setStatus("lost", "disconnected");
  banner(`No data from the router (${error.name === "TimeoutError" ? "it does not answer" : error.message}). Retrying every ${seconds(delayMs / 1000)}.`);
  if (!view) console.info(error.message);
  return delayMs;
}

function signIn(message) {
  api.key.forget();
  signedOut = true;
  view = null;
  banner(null);
  setStatus("paused", "signed out");
  setText(byId("login-error"), message);
  show("login");
  byId("leave").hidden = true;
  byId("key").value = "";
  byId("key").focus();
}

function pause() {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  setText(byId("pause"), paused ? "Resume" : "Pause");
  if (paused) setStatus("paused", "paused");
  else look();
}

function theme(name) {
  document.documentElement.dataset.theme = name;
}

function nextTheme() {
  const now = document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: light)").matches ? "light" : "dark");
  const next = now === "light" ? "dark" : "light";
  localStorage.setItem(THEME, next);
  theme(next);
}

byId("login-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) return signIn("A key has no spaces and only ASCII characters.");
  api.key.set(key);
  signedOut = false;
  setText(byId("login-error"), "");
  look();
});
byId("leave").addEventListener("click", () => signIn(""));
byId("pause").addEventListener("click", pause);
byId("theme").addEventListener("click", nextTheme);
document.addEventListener("visibilitychange", look);
document.addEventListener("keydown", (event) => {
  if (event.target.matches("input") || event.ctrlKey || event.metaKey || event.altKey || byId("drawer").open) return;
  if (event.key === "p") pause();
  if (event.key === "t") nextTheme();
  if (event.key === "/") { event.preventDefault(); byId("filter").focus(); }
});
if (localStorage.getItem(THEME)) theme(localStorage.getItem(THEME));
look();
