// The tables: rows are kept and changed in place, so that focus, selection and open details survive the next message.
import { ago, bytes, clock, loss, number, rate, short, small, whole } from "./format.js";

const SHOWN_MAX = 200;
const COLUMNS = [
  { key: "peer", title: "Peer", sort: (peer) => (peer.name || peer.short).toLowerCase() },
  { key: "state", title: "Now", sort: (peer) => peer.state },
  { key: "device", title: "Device", aside: true, sort: (peer) => peer.device, text: (peer) => peer.device || "–" },
  { key: "rate", title: "Samples/s", number: true, down: true, sort: (peer) => peer.samples_per_s, text: (peer) => (peer.fresh ? rate(peer.samples_per_s) + (peer.capped ? " !" : "") : "–") },
  { key: "epoch", title: "Epoch", number: true, down: true, sort: (peer) => peer.epoch, text: (peer) => whole(peer.epoch) },
  { key: "gave", title: "Last gave", number: true, down: true, sort: (peer) => peer.contributed_s ?? 0, text: (peer, now) => (peer.contributed_s === null ? "–" : `${ago(now - peer.contributed_s)} ago`) },
  { key: "loss", title: "Loss", number: true, sort: (peer) => peer.loss ?? Infinity, text: (peer) => loss(peer.loss) },
  { key: "up", title: "Sent", number: true, down: true, aside: true, sort: (peer) => peer.up_bytes, text: (peer) => bytes(peer.up_bytes) },
  { key: "down", title: "Received", number: true, down: true, aside: true, sort: (peer) => peer.down_bytes, text: (peer) => bytes(peer.down_bytes) },
  { key: "drift", title: "Drift", number: true, down: true, aside: true, sort: (peer) => peer.drift ?? -1, text: (peer) => small(peer.drift) },
  { key: "reach", title: "Reachable", aside: true, sort: (peer) => String(peer.reached), text: (peer) => (peer.reach.startsWith("relay") ? "relay" : peer.reached === null ? peer.reach || "–" : peer.reached ? "answers" : peer.reach === "none" ? "no port" : "no answer") },
];

// kinds of events that are shown and hidden together; of each the latest are kept, so that none drowns the others
export const EVENT_GROUPS = {
  peers: { label: "peers", kinds: ["joined", "left", "lost", "quiet", "back", "watching"] },
  rounds: { label: "rounds", kinds: ["round_failed", "differs", "lied", "not_finite"] },
  lineage: { label: "lineage", kinds: ["break", "reunion", "jump"] },
  run: { label: "run", kinds: [] }, // all others
  saves: { label: "checkpoints", kinds: ["saved", "not_saved"] },
};
const EVENTS_MAX = 100; // of a group
const groupOf = (kind) => Object.keys(EVENT_GROUPS).find((group) => EVENT_GROUPS[group].kinds.includes(kind)) ?? "run";

// On a phone each row is a card, in which a cell has its heading beside it.
const labelled = (row) => {
  const heads = row.closest("table")?.tHead.rows[0].cells ?? [];
  [...row.cells].forEach((cell, place) => { if (heads[place]) cell.dataset.label = heads[place].textContent; });
};
const fillRows = (body, rows) => {
  body.replaceChildren(...rows);
  rows.forEach(labelled);
};

const make = (tag, className, text) => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
};
const put = (element, text) => { if (element.textContent !== text) element.textContent = text; };

export class PeerTable {
  constructor(table, filter, more, sorting) {
    this.head = table.tHead.rows[0];
    this.body = table.tBodies[0];
    this.filter = filter;
    this.more = more;
    this.rows = new Map();
    this.open = new Set();
    this.sort = { key: "rate", down: true };
    this.limit = SHOWN_MAX;
    for (const column of COLUMNS) {
      const th = make("th", [column.number && "number", column.aside && "aside"].filter(Boolean).join(" "));
      th.scope = "col";
      const button = make("button", "", column.title);
      button.type = "button";
      button.addEventListener("click", () => {
        this.sort = { key: column.key, down: this.sort.key === column.key ? !this.sort.down : Boolean(column.down) };
        this.draw();
      });
      th.append(button);
      this.head.append(th);
      sorting.append(new Option(column.title, column.key));
    }
    this.sorting = sorting; // on phones, which show no headings
    sorting.addEventListener("change", () => {
      const { key, down } = COLUMNS.find((column) => column.key === sorting.value);
      this.sort = { key, down: Boolean(down) };
      this.draw();
    });
    filter.addEventListener("input", () => this.draw());
  }

  show(peers, now) {
    this.peers = peers;
    this.now = now;
    this.draw();
  }

  draw() {
    if (!this.peers) return;
    const wanted = this.filter.value.trim().toLowerCase();
    const column = COLUMNS.find(({ key }) => key === this.sort.key);
    COLUMNS.forEach(({ key }, place) => this.head.cells[place].setAttribute("aria-sort", key !== this.sort.key ? "none" : this.sort.down ? "descending" : "ascending"));
    this.sorting.value = this.sort.key;
    const sign = this.sort.down ? -1 : 1;
    const matching = [...this.peers.values()].filter((peer) => !wanted || [peer.name, peer.peer_id, peer.device, peer.state].some((text) => text.toLowerCase().includes(wanted)));
    matching.sort((a, b) => {
      if (a.stranger !== b.stranger) return a.stranger ? 1 : -1;
      if (a.fresh !== b.fresh) return a.fresh ? -1 : 1;
      const [x, y] = [column.sort(a), column.sort(b)];
      return x < y ? -sign : x > y ? sign : a.peer_id < b.peer_id ? -1 : 1;
    });
    const most = Math.max(1e-9, ...matching.map((peer) => (peer.fresh ? peer.samples_per_s : 0)));
    const shown = matching.slice(0, this.limit);
    const kept = new Set();
    let place = this.body.firstElementChild;
    for (const peer of shown) {
      kept.add(peer.peer_id);
      const row = this.rows.get(peer.peer_id) ?? this.add(peer);
      this.fill(row, peer, most);
      for (const element of row.details.parentNode || this.open.has(peer.peer_id) ? [row.line, row.details] : [row.line]) {
        if (element !== place) this.body.insertBefore(element, place);
        else place = place.nextElementSibling;
      }
    }
    for (const [peerId, row] of this.rows) {
      if (!kept.has(peerId)) { row.line.remove(); row.details.remove(); this.rows.delete(peerId); }
    }
    const hidden = matching.length - shown.length;
    const text = !this.peers.size ? "No peer takes part at the moment." : hidden > 0 ? `${hidden} more: narrow the search to find them.` : wanted ? `${matching.length} of ${this.peers.size} peers` : "";
    put(this.more, text);
  }

  add(peer) {
    const line = make("tr");
    const cells = COLUMNS.map((column) => {
      const cell = make("td", [column.number && "number", column.aside && "aside", column.key === "rate" && "rate"].filter(Boolean).join(" "));
      cell.dataset.label = column.title;
      line.append(cell);
      return cell;
    });
    const who = make("button", "who");
    who.type = "button";
    who.setAttribute("aria-expanded", "false");
    cells[0].append(who);
    const tag = make("span", "tag");
    cells[1].append(tag);
    const details = make("tr", "details");
    const inside = make("td");
    inside.colSpan = COLUMNS.length;
    details.append(inside);
    const row = { line, details, cells, who, tag, inside };
    who.addEventListener("click", () => {
      const opened = !this.open.delete(peer.peer_id);
      if (opened) this.open.add(peer.peer_id);
      who.setAttribute("aria-expanded", String(opened));
      if (!opened) details.remove();
      this.draw();
    });
    this.rows.set(peer.peer_id, row);
    return row;
  }

  fill(row, peer, most) {
    row.line.classList.toggle("stale", !peer.fresh);
    const name = peer.name || peer.short;
    if (row.who.dataset.name !== name) {
      row.who.dataset.name = name;
      row.who.replaceChildren(name, ...(peer.name ? [" ", make("code", "", peer.short)] : []));
      row.who.title = peer.peer_id;
    }
    const state = peer.state === "quiet" ? `silent ${ago(this.now - peer.updated_s)}` : peer.state === "idle" ? `idle ${ago(peer.idle_s)}` : peer.state;
    put(row.tag, peer.accused_by ? `${state}, lied` : state);
    row.tag.className = `tag ${peer.accused_by ? "bad" : peer.state}`;
    COLUMNS.forEach((column, place) => { if (column.text) put(row.cells[place], column.text(peer, this.now)); });
    row.cells[3].style.setProperty("--share", `${peer.fresh ? (100 * peer.samples_per_s) / most : 0}%`);
    if (this.open.has(peer.peer_id)) this.detail(row, peer);
  }

  detail(row, peer) {
    const details = [
      ["PeerID", peer.peer_id], ["Last update", `${ago(this.now - peer.updated_s)} ago`], ["Takes part for", peer.since_s === null ? "–" : ago(this.now - peer.since_s)],
      ["Device", peer.device || "–"], ["Software", peer.agent || "–"],
      ["Reachable", `${peer.reach || "not declared"}; ${peer.reached === null ? "not called yet" : peer.reached ? "answers this monitor" : "does not answer this monitor"}`],
      ["In this epoch", `${whole(peer.samples)} samples`], ["Contributed", `${whole(peer.samples_given)} samples`],
      ["Loss", `${loss(peer.loss)}, held out ${loss(peer.validation_loss)}`], ["Rounds", `${whole(peer.rounds_done)}, ${whole(peer.rounds_failed)} failed`],
      ["Sends", `${bytes(peer.up_bytes_per_s)}/s, ${bytes(peer.up_bytes)} so far`], ["Receives", `${bytes(peer.down_bytes_per_s)}/s, ${bytes(peer.down_bytes)} so far`], ["Drift", small(peer.drift)],
      ["History", `${peer.head.slice(0, 8) || "–"}; gave up ${whole(peer.epochs_given_up)} epochs`],
      ...Object.entries(peer.own).map(([name, value]) => [name, number(value)]),
    ];
    if (peer.capped) details.push(["Rate", "claims more than three times the median: only that much is counted"]);
    if (peer.broken.length) details.push(["Not finite", peer.broken.join(", ")]);
    if (peer.stranger) details.push(["Standing", "a stranger: no certificate of the run names it, and its values count nowhere"]);
    if (peer.accused_by) details.push(["Accused", `of lying as a reducer, by ${peer.accused_by} peers`]);
    const list = make("dl");
    for (const [term, text] of details) {
      const pair = make("div");
      pair.append(make("dt", "", term), make("dd", "", text));
      list.append(pair);
    }
    if (row.inside.textContent !== list.textContent) row.inside.replaceChildren(list);
  }
}

export function showRounds(body, rounds) {
  fillRows(body, rounds.slice(0, 30).map((round) => {
    const row = make("tr");
    const ended = make("td");
    const names = Object.entries(round.left).map(([peer, why]) => `${short(peer)} ${why}`).join("; ");
    if (round.failed) ended.append(make("span", "tag warning", "failed"), ` ${round.detail || round.reason}`);
    else if (round.digests > 1) ended.append(make("span", "tag bad", "differs"), " members hold different averages");
    else if (names) ended.append(make("span", "tag warning", "without"), ` ${names}`);
    else if (round.failed_for) ended.append(make("span", "tag warning", "partly"), ` failed for ${round.failed_for} of ${round.reported_by}: ${round.detail || round.reason}`);
    else ended.append(make("span", "tag good", "agreed"), ` ${round.digest.slice(0, 8)}`);
    row.append(make("td", "", clock(round.at_s)), make("td", "", `${whole(round.epoch)}${round.kind === "state" ? " state" : ""}`), make("td", "number", whole(round.members)), make("td", "number", round.seconds.toFixed(2)), make("td", "number", bytes(round.bytes)), ended);
    return row;
  }));
}

export function addEvents(list, events) {
  for (const event of events) {
    const item = make("li", event.level);
    item.dataset.group = groupOf(event.kind);
    const time = make("time", "", clock(event.at_s));
    time.dateTime = new Date(event.at_s * 1000).toISOString();
    item.append(time, make("span", "mark-level"), make("span", "", event.text));
    list.prepend(item);
  }
  for (const group of Object.keys(EVENT_GROUPS)) {
    [...list.querySelectorAll(`li[data-group="${group}"]`)].slice(EVENTS_MAX).forEach((item) => item.remove());
  }
}

export function showLeaders(card, body, note, view) {
  card.hidden = !view.leaders.length;
  const more = view.contributors > view.leaders.length ? ` ${whole(view.contributors)} peers have given something; these are the first.` : "";
  put(note, `Samples since the run began, as its members have signed them. Names are those that peers give themselves.${more}`);
  const all = Math.max(1, view.samples_given);
  fillRows(body, view.leaders.map((leader, place) => {
    const row = make("tr"), who = make("td");
    who.append(leader.name || leader.short, ...(leader.name ? [" ", make("code", "", leader.short)] : []));
    who.title = leader.peer_id;
    row.append(make("td", "number", whole(place + 1)), who, make("td", "number", whole(leader.samples)), make("td", "number", `${number((100 * leader.samples) / all, 1)} %`), make("td", "number", whole(leader.rounds)));
    return row;
  }));
}

export function showExperts(card, body, experts) {
  card.hidden = !experts.length;
  fillRows(body, experts.slice(0, 500).map((expert) => {
    const row = make("tr");
    row.append(make("td", "", expert.uid), make("td", "number", whole(expert.servers)), make("td", "number", expert.load === null ? "–" : `${number(expert.load)} s`), make("td", "", expert.text));
    return row;
  }));
}

export function showRelays(card, body, relays) {
  card.hidden = !relays.length;
  fillRows(body, relays.map((relay) => {
    const row = make("tr");
    row.title = relay.peer_id;
    row.append(make("td", "", relay.short), ...[whole(relay.reservations), whole(relay.circuits), bytes(relay.carried_bytes), whole(relay.refused), `${ago(relay.age_s)} ago`].map((text) => make("td", "number", text)));
    return row;
  }));
}
