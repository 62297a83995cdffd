// The page: loads the history once, then receives updates. Values that are not fresh are never shown as if they were.
import { Charts } from "./charts.js";
import { ago, bytes, dated, loss, number, rate, small, whole } from "./format.js";
import { addEvents, EVENT_GROUPS, PeerTable, showExperts, showLeaders, showRelays, showRounds } from "./tables.js";

const SPANS = [["10 min", 600], ["1 h", 3600], ["6 h", 21600], ["1 d", 86400], ["7 d", 604800], ["all", 0]];
const SILENT_MS = 9000; // without a message from the monitor
const BROKEN_MS = 2500; // the same when the connection is known to be closed
const POINTS = 600;
const MARKED = ["break", "reunion", "jump"]; // kinds of events that the charts mark
const MARKS_MAX = 300;
const $ = (id) => document.getElementById(id);
const put = (id, text) => { const element = $(id); if (element.textContent !== text) element.textContent = text; };
const stored = (name, otherwise) => { try { return localStorage.getItem(name) ?? otherwise; } catch { return otherwise; } };
const store = (name, value) => { try { localStorage.setItem(name, value); } catch { /* a private window */ } };

const state = { view: null, received: 0, peers: new Map(), at: [], series: {}, bucket: 2, began: null, span: Number(stored("swarm.span", 600)), loaded: 0 };

const charts = new Charts($("charts"), (zoom) => { $("unzoom").hidden = zoom === null; load(); });
charts.add("loss", { title: "Loss", className: "wide", format: loss, axis: (mark) => number(mark, 2), log: () => $("log").checked, series: [{ key: "loss", label: "training", color: "--loss" }, { key: "validation_loss", label: "held out", color: "--held" }] });
charts.add("peers", { title: "Peers", className: "third", format: whole, axis: (mark) => (Number.isInteger(mark) ? String(mark) : ""), zero: true, stepped: true, fill: true, series: [{ key: "peers", label: "training", color: "--peers" }] });
charts.add("rate", { title: "Throughput", format: (value) => `${rate(value)}/s`, axis: rate, zero: true, fill: true, series: [{ key: "samples_per_s", label: "samples", color: "--rate" }] });
charts.add("bytes", { title: "Traffic", format: (value) => `${bytes(value)}/s`, axis: (mark) => `${bytes(mark)}/s`, zero: true, fill: true, series: [{ key: "bytes_per_s", label: "sent", color: "--bytes" }] });
charts.add("round", { title: "Rounds", format: (value) => (value === null ? "–" : `${number(value, 2)} s`), axis: (mark) => `${mark} s`, zero: true, series: [{ key: "round_s", label: "took", color: "--other" }] });
const table = new PeerTable($("peers"), $("filter"), $("peers-more"), $("sort"));
window.swarmPage = { state, charts }; // for debugging and tests

// --- charts

const now = () => (state.view ? state.view.at_s + (performance.now() - state.received) / 1000 : Date.now() / 1000);
const spanNow = () => state.span || Math.max(60, now() - (state.began ?? now() - 60));

function windowNow() {
  const to = now();
  const first = state.at.length ? Math.max(to - spanNow(), Math.min(state.at[0], to - 30)) : to - spanNow();
  return [first, to];
}

async function load() {
  const request = (state.loaded += 1);
  const query = charts.zoom ? `since=${charts.zoom[0]}&until=${charts.zoom[1]}` : `span=${state.span || Math.max(60, now() - (state.began ?? 0))}`;
  try {
    const reply = await fetch(`api/history?${query}&points=${POINTS}`);
    if (!reply.ok || request !== state.loaded) return;
    const found = await reply.json();
    Object.assign(state, { at: found.at, series: found.series, bucket: found.seconds, began: found.began });
    for (const column of Object.values(state.series)) while (column.length < state.at.length) column.push(null);
    addOwnCharts();
    drawCharts();
  } catch { /* the banner reports that the monitor is away */ }
}

function addOwnCharts() {
  for (const name of Object.keys(state.series).filter((key) => key.startsWith("own.")).sort().slice(0, 24)) {
    if (!charts.has(name)) charts.add(name, { title: name.slice(4), format: (value) => number(value), axis: (mark) => number(mark, 2), series: [{ key: name, label: "median", color: "--other" }] });
  }
  if ((state.series.drift ?? []).some((value) => value !== null) && !charts.has("drift")) {
    charts.add("drift", { title: "Drift", format: small, axis: small, zero: true, least: 1e-6, series: [{ key: "drift", label: "median", color: "--held" }] });
  }
}

function append(view) {
  if (view.link.status !== "live" || charts.zoom) return;
  const last = state.at.at(-1) ?? 0;
  if (view.at_s - last < Math.max(state.bucket, 1) * 0.9) return;
  const values = { loss: view.loss, validation_loss: view.validation_loss, samples_per_s: view.samples_per_s, peers: view.peers_live, bytes_per_s: view.bytes_per_s, drift: view.drift, round_s: view.rounds.find((round) => !round.failed)?.seconds ?? null };
  for (const [name, metric] of Object.entries(view.own)) values[`own.${name}`] = metric.median;
  state.at.push(view.at_s);
  for (const name of new Set([...Object.keys(state.series), ...Object.keys(values)])) {
    const column = (state.series[name] ??= new Array(state.at.length - 1).fill(null));
    column.push(values[name] ?? null);
  }
  const from = view.at_s - spanNow() - 60;
  const stale = state.at.findIndex((at) => at >= from);
  if (stale > 50) { state.at.splice(0, stale); for (const column of Object.values(state.series)) column.splice(0, stale); }
  addOwnCharts();
}

function drawCharts() { charts.show(state.at, state.series, Math.max(3 * state.bucket, 25), windowNow()); }

// --- the present view

function onMessage(message) {
  const view = JSON.parse(message.data);
  state.received = performance.now();
  if (!state.view) addEvents($("events"), view.events.slice(-300));
  else addEvents($("events"), view.events);
  charts.marks = [...charts.marks, ...view.events.filter(({ kind }) => MARKED.includes(kind))].slice(-MARKS_MAX);
  state.view = view;
  for (const peer of view.peers) state.peers.set(peer.peer_id, peer);
  for (const peerId of view.gone) state.peers.delete(peerId);
  append(view);
  draw();
  if (!charts.zoom) drawCharts();
  showRounds($("rounds").tBodies[0], view.rounds);
  showLeaders($("leaders-card"), $("leaders").tBodies[0], $("leaders-note"), view);
  showExperts($("experts-card"), $("experts").tBodies[0], view.experts);
  showRelays($("relays-card"), $("relays").tBodies[0], view.relays);
}

function draw() {
  const { view } = state;
  if (!view) return;
  const { run } = view;
  const silent = performance.now() - state.received;
  const status = silent > (source.readyState === EventSource.OPEN ? SILENT_MS : BROKEN_MS) ? "off" : view.link.status;
  document.body.dataset.link = status;
  const age = (view.link.age_s ?? 0) + silent / 1000;
  const is = status !== "live" ? status : run.ended ? "ended" : run.paused ? "paused" : view.peers_live ? "live" : "empty";
  document.body.dataset.run = is;
  put("status-text", { live: "live", ended: "ended", paused: "paused", empty: "nobody trains", joining: "joining", late: `${ago(age)} old`, lost: `no peer answers, ${ago(age)} old`, off: `monitor away, ${ago(age)} old` }[is] ?? is);
  banner(status, is, view, age);
  put("run-name", run.name || run.run_id);
  put("run-about", [run.description, run.parameters ? `${whole(run.parameters)} parameters` : "", run.mode, run.codec, run.name ? run.run_id : ""].filter(Boolean).join(" · "));
  $("run-message").hidden = !run.message;
  put("run-message", run.message ? `The owner says: ${run.message}` : "");
  put("t-epoch", whole(view.epoch));
  const percent = view.fraction === null ? 0 : 100 * view.fraction;
  $("t-meter-fill").style.width = `${percent}%`;
  $("t-meter").setAttribute("aria-valuenow", Math.round(percent));
  const target = run.target ? ` of ${whole(run.target)}` : "";
  put("t-epoch-note", `${whole(view.samples)}${target} samples${view.eta_s > 2 && status === "live" ? `, ${ago(view.eta_s)} to go` : ""}`);
  put("t-loss", loss(view.loss));
  put("t-loss-note", "median over peers");
  put("t-held", loss(view.validation_loss));
  put("t-held-note", "median over peers");
  put("t-rate", rate(view.samples_per_s));
  put("t-peers", whole(view.peers_live));
  put("t-peers-note", [view.peers_quiet ? `${view.peers_quiet} silent` : "all up to date", ...(view.strangers ? [`${view.strangers} strangers`] : []), ...(view.drift === null ? [] : [`drift ${small(view.drift)}`])].join(", "));
  const histories = view.histories.map((one) => `${whole(one.peers)} in ${one.head.slice(0, 8)}`).join(", ");
  put("t-bytes", `${bytes(view.bytes_per_s)}/s`);
  put("t-bytes-note", "sent, all peers");
  put("state-note", [view.state ? `State of epoch ${whole(view.state.epoch)}: ${view.state.donors} donor${view.state.donors === 1 ? "" : "s"} hold ${view.state.digest.slice(0, 12)}${view.state.others ? `, ${view.state.others} hold another` : ""}.` : "", histories ? `${view.histories.length === 1 ? "One history" : `${view.histories.length} histories`}: peers ${histories}.` : "", view.checkpoint].filter(Boolean).join(" "));
  document.title = `${status === "live" ? "" : "⚠ "}${view.loss === null ? "" : `${number(view.loss, 3)} · `}epoch ${whole(view.epoch)} · ${run.name || run.run_id}`;
  table.show(state.peers, now());
}

const PLACE = { ended: "The run has ended. What is shown is its last state.", paused: "The owner has paused the run: peers keep its state, and nobody trains.", empty: "Nobody trains this run at the moment." };

function planned(run) {
  const next = run.pauses.filter(([, until]) => until > now()).sort((one, other) => one[0] - other[0])[0];
  return next ? ` Planned pause: ${dated(next[0])} to ${dated(next[1])}.` : "";
}

function banner(status, is, view, age) {
  const divided = view.histories.length > 1 ? `The run is divided into ${view.histories.length} histories: ${view.histories.map((one) => `${whole(one.peers)} peers in ${one.head.slice(0, 8)}`).join(", ")}.` : "";
  const text = status === "off" ? `The monitor does not answer. What is shown is ${ago(age)} old.`
    : status === "lost" ? `No peer answers the monitor. What is shown is ${ago(age)} old. ${view.link.text}`
    : status === "late" ? `No answer from the swarm for ${ago(age)}: the values are old.`
    : view.link.text || divided || `${PLACE[is] ?? ""}${view.run.ended ? "" : planned(view.run)}`.trim();
  const element = $("banner");
  element.hidden = !text;
  element.classList.toggle("mild", status === "live" || status === "late");
  if (text && element.textContent !== text) element.textContent = text;
}

// --- controls

for (const [label, seconds] of SPANS) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = label;
  button.setAttribute("aria-pressed", String(seconds === state.span));
  button.addEventListener("click", () => {
    state.span = seconds;
    store("swarm.span", seconds);
    for (const other of $("spans").children) other.setAttribute("aria-pressed", String(other === button));
    charts.setZoom(null);
  });
  $("spans").append(button);
}
const hidden = new Set(stored("swarm.hidden", "saves").split(",").filter(Boolean)); // groups of events
for (const [group, { label }] of Object.entries(EVENT_GROUPS)) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = label;
  const show = () => {
    button.setAttribute("aria-pressed", String(!hidden.has(group)));
    $("events").classList.toggle(`without-${group}`, hidden.has(group));
  };
  button.addEventListener("click", () => {
    if (!hidden.delete(group)) hidden.add(group);
    store("swarm.hidden", [...hidden].join(","));
    show();
  });
  show();
  $("kinds").append(button);
}
$("unzoom").addEventListener("click", () => charts.setZoom(null));
$("log").checked = stored("swarm.log", "") === "1";
$("log").addEventListener("change", () => { store("swarm.log", $("log").checked ? "1" : ""); charts.charts.get("loss").rebuild(); });
const theme = (name) => {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  charts.restyle();
};
$("theme").addEventListener("click", () => {
  const next = { "": "dark", dark: "light", light: "" }[document.documentElement.dataset.theme ?? ""];
  store("swarm.theme", next);
  theme(next);
});
theme(stored("swarm.theme", ""));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.restyle());

const source = new EventSource("api/events");
source.addEventListener("view", onMessage);
source.addEventListener("open", load); // also after the monitor has come back
setInterval(draw, 1000);
setInterval(() => { if (!charts.zoom) load(); }, 30000);
