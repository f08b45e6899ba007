// The page: asks once a second and shows what came.

import { TimeChart } from "./charts.js";
import { NeedsKey, ask, keepKey } from "./feed.js";
import { bytes, count, gbSeconds, number, percent, rate, seconds } from "./format.js";
import { HeatMap } from "./heatmap.js";
import { History } from "./history.js";
import { chosen, drawLoads } from "./loads.js";
import { fillTable, meter } from "./tables.js";

const EVERY_MS = 1000;
const TIMEOUT_MS = 8000;
const SECOND_LINE = [6, 4];

const get = (id) => document.getElementById(id);
const history = new History();
let state = null;
let paused = false;
let layer = 0;

// Theme

function applyTheme() {
  const wish = get("theme").value;
  const dark = wish === "dark" || (wish === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}

get("theme").value = localStorage.getItem("moeless-theme") ?? "auto";
applyTheme();

// Parts

const heat = new HeatMap(get("heat"), get("legend"), {
  onCell(cell, chose) {
    describeCell(cell);
    if (chose) get("heat-say").textContent = get("heat-cell").textContent;
    if (chose && cell.layer !== layer) setLayer(cell.layer);
  },
});

const charts = [
  new TimeChart(get("straggler"), [
    { name: "ours", label: "MoEless", colour: "--s1" },
    { name: "fixed", label: "static", colour: "--s2", dash: SECOND_LINE },
    { name: "oracle", label: "oracle", colour: "--s3", dash: [2, 4] },
  ], (value) => number(value), 0.9),
  new TimeChart(get("latency"), [
    { name: "ttft50", label: "first token, median", colour: "--s1" },
    { name: "ttft99", label: "first token, p99", colour: "--s1", dash: SECOND_LINE },
    { name: "tpot50", label: "each further, median", colour: "--s2" },
    { name: "tpot99", label: "each further, p99", colour: "--s2", dash: SECOND_LINE },
  ], seconds),
  new TimeChart(get("throughput"), [
    { name: "tokens", label: "tokens per second", colour: "--s1" },
    { name: "running", label: "running", colour: "--s3", dash: SECOND_LINE },
    { name: "waiting", label: "waiting", colour: "--s2", dash: [2, 4] },
  ], rate),
  new TimeChart(get("starts"), [
    { name: "cold", label: "cold starts", colour: "--s1" },
    { name: "blocking", label: "tokens waited", colour: "--s2" },
    { name: "evictions", label: "evictions", colour: "--s4", dash: SECOND_LINE },
  ], rate),
  new TimeChart(get("memory"), [
    { name: "billed", label: "billed", colour: "--s1" },
    { name: "resident", label: "resident", colour: "--s3" },
    { name: "reserved", label: "serverful", colour: "--s2", dash: SECOND_LINE },
  ], (value) => bytes(1e9 * value)),
];

// What is shown

function shownValues() {
  switch (get("measure").value) {
    case "total": return [state.tokens, true];
    case "replicas": return [state.replicas, false];
    case "planned": return [state.planned, false];
    default: return [history.recent, true];
  }
}

function showHeat() {
  const [values, rooted] = shownValues();
  const most = heat.show(values, [state.layers, state.experts], rooted);
  get("legend-high").textContent = rate(most);
  describeCell(heat.hover ?? heat.cursor);
}

function describeCell({ layer: row, expert }) {
  if (!state) return;
  const at = row * state.experts + expert;
  const text = `layer ${row}, expert ${expert}: ${rate(history.recent[at])} tokens/s, `
    + `${count(state.tokens[at])} in all, ${state.replicas[at]} warm of ${state.planned[at]} planned replicas`;
  if (get("heat-cell").textContent !== text) get("heat-cell").textContent = text;
}

function showBusiest() {
  if (!get("busiest").closest("details").open) return;
  const order = Array.from(history.recent.keys());
  order.sort((a, b) => history.recent[b] - history.recent[a] || state.tokens[b] - state.tokens[a]);
  fillTable(
    get("busiest"),
    ["layer", "expert", "tokens per second", "tokens", "warm replicas", "planned"],
    order.slice(0, 20).map((at) => [
      String(Math.floor(at / state.experts)), String(at % state.experts), rate(history.recent[at]),
      count(state.tokens[at]), String(state.replicas[at]), String(state.planned[at]),
    ]),
  );
}

function tile(label, value, more = "") {
  const box = document.createElement("div");
  const term = document.createElement("dt");
  const text = document.createElement("dd");
  const small = document.createElement("small");
  term.textContent = label;
  text.textContent = value;
  small.textContent = more;
  text.append(small);
  box.append(term, text);
  return box;
}

function showTiles() {
  const { requests, gb_s: cost, predictor } = state;
  const known = state.accuracy.filter((value) => value !== null);
  const accuracy = known.length ? known.reduce((a, b) => a + b) / known.length : null;
  const starts = state.warm_starts + state.blocking_loads;
  const ours = latest("ours");
  const fixed = latest("fixed");
  const more = predictor.kind === "auto" ? `, ${predictor.swaps} swaps` : "";
  get("tiles").replaceChildren(
    tile("Tokens per second", rate(requests.tokens_per_second), `${count(requests.generated_tokens)} since the start`),
    tile("Requests", `${requests.running} running`, `${requests.waiting} waiting`),
    tile("First token", requests.ttft.count ? seconds(requests.ttft.p50_s) : "–", requests.ttft.count ? `p99 ${seconds(requests.ttft.p99_s)}` : "no request yet"),
    tile("Each further token", requests.tpot.count ? seconds(requests.tpot.p50_s) : "–", requests.tpot.count ? `p99 ${seconds(requests.tpot.p99_s)}` : "no request yet"),
    tile("Straggler ratio", number(ours, 3), `static ${number(fixed, 3)}, oracle 1`),
    tile("Warm starts", percent(starts ? state.warm_starts / starts : null, 2), `${count(state.cold_starts)} cold, ${count(state.blocking_loads)} waited for`),
    tile("Memory × time", percent(cost.reserved ? cost.resident / cost.reserved : null), "of serverful is held"),
    tile("Predictor", predictor.kind, `${accuracy === null ? "no forecast yet" : `${percent(accuracy)} right`}${more}`),
  );
}

// The newest value that is known: without traffic there is none.
function latest(name) {
  return history.series[name]?.findLast((value) => value !== null) ?? null;
}

function showLoads() {
  const { detail } = state;
  const [canvas, help] = [get("predicted"), get("predicted-help")];
  if (!detail?.actual) {
    help.textContent = "No tokens in this layer yet.";
    drawLoads(canvas, null);
    return;
  }
  const { actual, expected } = detail;
  const shown = chosen(actual, expected);
  const accuracy = state.accuracy[detail.layer];
  const some = shown.length < actual.length ? `, the ${shown.length} busiest of ${actual.length} experts` : "";
  const marks = expected ? "Bars came, marks were expected" : "Bars came; nothing was expected of this step";
  help.textContent = `${marks}; tokens of the newest step${some}.${accuracy === null ? "" : ` Load accuracy of the layer ${percent(accuracy)}.`}`;
  drawLoads(canvas, detail);
  if (get("predicted-table").closest("details").open) {
    fillTable(
      get("predicted-table"),
      ["expert", "actual", "expected"],
      shown.map((e) => [String(e), String(actual[e]), expected ? number(expected[e], 1) : "–"]),
    );
  }
}

// How fast a device loads, and how long a replica takes to become warm there.
function loads(device) {
  const [loaded, busy, cold] = [state.loaded_bytes[device], state.loading_s[device], state.cold_start[device]];
  return [busy > 0 ? `${bytes(loaded / busy)}/s` : "–", cold?.count ? seconds(cold.p50_s) : "–"];
}

function showDevices() {
  const states = Object.keys(state.instances);
  fillTable(
    get("devices"),
    ["device", "state", "memory", "", "tokens", ...states, "loads", "cold start", "worker restarts"],
    state.devices.map((name, device) => {
      const [held, most] = [state.resident_bytes[device], state.budget_bytes[device]];
      return [
        name, state.device_states[device], `${bytes(held)} of ${bytes(most)}`, meter(held, most, `memory of ${name}`),
        count(state.device_tokens[device]),
        ...states.map((kind) => count(state.instances[kind][device])),
        ...loads(device), count(state.worker_restarts[device] ?? 0),
      ];
    }),
  );
}

function showCost() {
  const { billed, resident, reserved, paper } = state.gb_s;
  const share = (value) => percent(reserved ? value / reserved : null, 2);
  fillTable(get("cost"), ["accounting", "since the start", "of serverful"], [
    ["billed: while functions execute", gbSeconds(billed), share(billed)],
    ["resident: on devices, idle included", gbSeconds(resident), share(resident)],
    ["paper: layer time × warm replicas", gbSeconds(paper), share(paper)],
    ["serverful: whole devices, always", gbSeconds(reserved), share(reserved)],
  ]);
}

function showLayers() {
  if (!get("layers").closest("details").open) return;
  const mean = (sums, i) => (sums && state.layer_steps[i] ? sums[i] / state.layer_steps[i] : null);
  fillTable(
    get("layers"),
    ["layer", "steps", "straggler ratio", "static", "load accuracy"],
    state.layer_steps.map((steps, i) => [
      String(i), count(steps), number(mean(state.straggler_sum, i), 3),
      number(mean(state.static_sum, i), 3), percent(state.accuracy[i]),
    ]),
  );
}

// Devices may join and leave; those that have left are listed but do not count.
function devicesInWords() {
  const up = state.device_states.filter((kind) => kind === "up").length;
  const others = state.device_states.filter((kind) => kind === "starting" || kind === "draining").length;
  return `${up} device${up === 1 ? "" : "s"}${others ? ` (${others} coming or going)` : ""}`;
}

function showAll() {
  get("model").textContent = `${state.model} · ${state.layers} layers × ${state.experts} experts · ${devicesInWords()}`;
  get("layer").max = state.layers - 1;
  showTiles();
  showHeat();
  showBusiest();
  for (const chart of charts) chart.update(history);
  showLoads();
  showDevices();
  showCost();
  showLayers();
}

// The loop

function setStatus(kind, text) {
  const status = get("status");
  status.dataset.state = kind;
  if (status.textContent !== text) status.textContent = text;
}

async function turn() {
  if (!paused && !document.hidden) {
    try {
      const first = state === null;
      state = await ask(layer, TIMEOUT_MS);
      // The first layers have no forecast where one looks ahead.
      if (first && !state.detail?.expected) setLayer(Math.min(state.predictor.distance, state.layers - 1));
      history.take(state);
      showAll();
      document.documentElement.dataset.updates = String(Number(document.documentElement.dataset.updates ?? 0) + 1);
      setStatus("live", "live");
    } catch (error) {
      if (error instanceof NeedsKey) {
        setStatus("lost", "needs a key");
        await askForKey(error.message);
      } else {
        setStatus("lost", `no answer: ${error.message}`);
      }
    }
  }
  setTimeout(turn, EVERY_MS);
}

function askForKey(reason) {
  const dialog = get("key-dialog");
  if (reason) get("key-text").textContent = reason;
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      keepKey(get("key").value);
      get("key").value = "";
      resolve();
    }, { once: true });
  });
}

function setLayer(value) {
  layer = value;
  get("layer").value = String(value);
}

get("pause").addEventListener("click", () => {
  paused = !paused;
  get("pause").setAttribute("aria-pressed", String(paused));
  setStatus(paused ? "paused" : "live", paused ? "paused" : "live");
});
get("measure").addEventListener("change", () => state && showHeat());
get("layer").addEventListener("change", () => {
  const wish = Number.parseInt(get("layer").value, 10);
  if (Number.isInteger(wish) && wish >= 0 && (!state || wish < state.layers)) setLayer(wish);
  else setLayer(layer);
});
get("theme").addEventListener("change", () => {
  localStorage.setItem("moeless-theme", get("theme").value);
  redraw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
for (const id of ["busiest", "predicted-table", "layers"]) {
  get(id).closest("details").addEventListener("toggle", () => state && showAll());
}

function redraw() {
  applyTheme();
  heat.repaint();
  for (const chart of charts) chart.repaint();
  if (state) showLoads();
}

turn();
