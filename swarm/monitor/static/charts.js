// Charts over time on uPlot: one cursor and one zoom for all of them, tooltips, gaps without samples, keyboard access.
import { moment } from "./format.js";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const HEIGHT = 210;
const MARK_COLORS = { break: "--bad", reunion: "--good", jump: "--warn" };
const MARK_NEAR = 0.01; // of the shown time: the tooltip has the text of marks that are this near

// Neighbours further apart than `gap` seconds are not connected: the monitor saw nothing in between.
export function withGaps(at, columns, gap) {
  const xs = [], ys = columns.map(() => []);
  for (let i = 0; i < at.length; i++) {
    if (i && at[i] - at[i - 1] > gap) {
      xs.push((at[i] + at[i - 1]) / 2);
      ys.forEach((column) => column.push(null));
    }
    xs.push(at[i]);
    ys.forEach((column, place) => column.push(columns[place][i] ?? null));
  }
  return [xs, ...ys];
}

export class Charts {
  constructor(host, onZoom) {
    this.host = host;
    this.onZoom = onZoom; // called with [from, to], or null when the zoom is reset
    this.charts = new Map();
    this.zoom = null;
    this.window = [0, 1];
    this.marks = []; // events that are drawn as vertical lines: {at_s, kind, text}
    this.watcher = new ResizeObserver((entries) => entries.forEach(({ target }) => this.charts.get(target.dataset.chart)?.resize()));
  }

  add(id, options) {
    const chart = new Chart(this, id, options);
    this.charts.set(id, chart);
    this.host.append(chart.card);
    this.watcher.observe(chart.plot);
    return chart;
  }

  remove(id) {
    this.charts.get(id)?.destroy();
    this.charts.delete(id);
  }

  has(id) { return this.charts.has(id); }

  // at: seconds; series: name -> values; gap: seconds without a sample that interrupt the line; window: shown unless zoomed
  show(at, series, gap, window) {
    this.window = window;
    for (const chart of this.charts.values()) chart.show(at, series, gap);
  }

  range() { return this.zoom ?? this.window; }

  setZoom(zoom) {
    this.zoom = zoom;
    const [from, to] = this.range();
    for (const chart of this.charts.values()) chart.u?.setScale("x", { min: from, max: to });
    this.onZoom(zoom);
  }

  restyle() { for (const chart of this.charts.values()) chart.rebuild(); }
}

class Chart {
  constructor(all, id, options) {
    this.all = all;
    this.options = options;
    this.data = null;
    this.card = document.createElement("article");
    this.card.className = `chart ${options.className ?? ""}`;
    this.card.innerHTML = '<header><h3></h3><div class="legend"></div></header><div class="plot" tabindex="0" role="img"></div><div class="tip" hidden></div>';
    this.card.querySelector("h3").textContent = options.title;
    this.plot = this.card.querySelector(".plot");
    this.plot.dataset.chart = id;
    this.plot.style.height = `${HEIGHT}px`;
    this.tip = this.card.querySelector(".tip");
    this.legend = this.card.querySelector(".legend");
    this.values = options.series.map((series) => {
      const item = document.createElement("span");
      const swatch = document.createElement("i");
      swatch.className = "swatch";
      swatch.style.background = `var(${series.color})`;
      const value = document.createElement("b");
      item.append(swatch, `${series.label} `, value);
      this.legend.append(item);
      return value;
    });
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.plot.addEventListener("blur", () => this.u?.setCursor({ left: -10, top: -10 }));
    this.empty();
  }

  empty() {
    const text = document.createElement("div");
    text.className = "empty";
    text.textContent = "no data yet";
    this.plot.replaceChildren(text);
    this.plot.setAttribute("aria-label", `${this.options.title}: no data yet`);
  }

  show(at, series, gap) {
    const columns = this.options.series.map(({ key }) => series[key] ?? []);
    const filled = columns.some((column) => column.some((value) => value !== null && value !== undefined));
    if (!filled) {
      if (this.u) { this.u.destroy(); this.u = null; this.empty(); }
      this.data = null;
      return;
    }
    this.data = withGaps(at, columns, gap);
    if (!this.u) this.rebuild();
    else this.u.setData(this.data, false);
    const [from, to] = this.all.range();
    this.u.setScale("x", { min: from, max: to });
    this.latest();
  }

  latest() {
    const last = this.data.slice(1).map((column) => column.findLast((value) => value !== null) ?? null);
    const index = this.u?.cursor.idx;
    const shown = index !== null && index !== undefined && this.u.cursor.left >= 0 ? this.data.slice(1).map((column) => column[index] ?? null) : last;
    shown.forEach((value, place) => { this.values[place].textContent = this.options.format(value); });
    const descriptions = this.options.series.map(({ label }, place) => {
      const column = this.data[place + 1].filter((value) => value !== null);
      return column.length ? `${label} now ${this.options.format(last[place])}, between ${this.options.format(Math.min(...column))} and ${this.options.format(Math.max(...column))}` : "";
    });
    this.plot.setAttribute("aria-label", `${this.options.title}: ${descriptions.filter(Boolean).join("; ")}`);
  }

  rebuild() {
    this.u?.destroy();
    this.u = null;
    if (!this.data) return;
    this.plot.replaceChildren();
    const { options, all } = this;
    const muted = css("--muted"), line = css("--line"), card = css("--card");
    const axis = { stroke: muted, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const log = options.log?.() ?? false;
    this.u = new uPlot({
      width: Math.max(80, this.plot.clientWidth), height: HEIGHT, padding: [8, 26, 0, 0],
      cursor: { sync: { key: "time" }, drag: { x: true, y: false, setScale: false }, points: { size: 7, fill: (u, i) => u.series[i]._color, stroke: () => card, width: 2 }, bind: { dblclick: () => () => { all.setZoom(null); return null; } } },
      legend: { show: false },
      scales: { x: { time: true, auto: false }, y: log ? { distr: 3 } : { range: (u, low, high) => span(low, high, options) } },
      axes: [{ ...axis, space: 70, size: 34, gap: 8, values: times }, { ...axis, size: 58, values: (u, marks) => marks.map((mark) => (mark === null ? "" : options.axis(mark))) }],
      series: [{}, ...options.series.map((series, place) => {
        const color = css(series.color);
        return { label: series.label, stroke: color, _color: color, width: 2, points: { show: (u, i, from, to) => to - from < 2 }, paths: options.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
          fill: options.fill && place === 0 ? (u) => fade(u, color) : undefined };
      })],
      hooks: {
        setSelect: [(u) => { if (u.select.width > 6) { all.setZoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]); u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false); } }],
        setCursor: [(u) => this.tooltip(u)],
        draw: [(u) => drawMarks(u, all.marks)],
      },
    }, this.data, this.plot);
    this.u.over.classList.add("over");
    const [from, to] = all.range();
    this.u.setScale("x", { min: from, max: to });
  }

  resize() {
    const width = Math.max(80, this.plot.clientWidth);
    if (this.u && this.u.width !== width) this.u.setSize({ width, height: HEIGHT });
  }

  tooltip(u) {
    const index = u.cursor.idx;
    const on = index !== null && index !== undefined && u.cursor.left >= 0 && this.data && this.data.slice(1).some((column) => (column[index] ?? null) !== null);
    this.latest();
    const here = on && (this.plot.matches(":hover") || document.activeElement === this.plot);
    this.tip.hidden = !here;
    if (!here) return;
    const [from, to] = this.all.range();
    const rows = [document.createElement("div")];
    rows[0].textContent = moment(this.data[0][index], to - from);
    this.options.series.forEach((series, place) => {
      const value = this.data[place + 1][index];
      if (value === null) return;
      const row = document.createElement("div");
      const swatch = document.createElement("i");
      swatch.style.background = `var(${series.color})`;
      row.append(swatch, `${series.label} ${this.options.format(value)}`);
      rows.push(row);
    });
    const near = (to - from) * MARK_NEAR;
    for (const mark of this.all.marks.filter(({ at_s }) => Math.abs(at_s - this.data[0][index]) <= near).slice(0, 3)) {
      const row = document.createElement("div");
      row.textContent = mark.text;
      rows.push(row);
    }
    this.tip.replaceChildren(...rows);
    const left = this.plot.offsetLeft + u.over.offsetLeft + u.cursor.left;
    const flip = left + this.tip.offsetWidth + 24 > this.card.clientWidth;
    this.tip.style.left = `${flip ? left - this.tip.offsetWidth - 12 : left + 12}px`;
    this.tip.style.top = `${this.plot.offsetTop + 14}px`;
  }

  key(event) {
    if (!this.u || event.ctrlKey || event.metaKey || event.altKey) return;
    const { u, all } = this;
    const [from, to] = all.range();
    const xs = this.data[0];
    const first = xs.findIndex((x) => x >= from), last = xs.findLastIndex((x) => x <= to);
    const step = event.shiftKey ? 10 : 1;
    const index = u.cursor.left >= 0 ? u.cursor.idx ?? last : last + step;
    const moves = { ArrowLeft: index - step, ArrowRight: index + step, Home: first, End: last };
    if (event.key in moves) {
      const x = xs[Math.min(Math.max(moves[event.key], first), last)];
      u.setCursor({ left: u.valToPos(x, "x"), top: u.over.clientHeight / 3 });
    } else if (event.key === "+" || event.key === "-") {
      const middle = u.cursor.left >= 0 ? u.posToVal(u.cursor.left, "x") : (from + to) / 2;
      const half = ((to - from) / 2) * (event.key === "+" ? 0.5 : 2);
      if (half > 2) all.setZoom([middle - half, middle + half]);
    } else if (event.key === "0" || event.key === "Escape") {
      all.setZoom(null);
    } else return;
    event.preventDefault();
  }

  destroy() {
    this.u?.destroy();
    this.card.remove();
  }
}

function span(low, high, options) {
  if (low === null || high === null) return [0, 1];
  if (low === 0 && high === 0) return [0, options.least ?? 1]; // nothing is above or below the line at zero
  if (options.zero) low = Math.min(0, low);
  const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [options.zero && low >= 0 ? 0 : low - room, high + room];
}

function drawMarks(u, marks) {
  const { left, top, width, height } = u.bbox;
  u.ctx.save();
  u.ctx.lineWidth = devicePixelRatio;
  u.ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const { at_s, kind } of marks) {
    const x = Math.round(u.valToPos(at_s, "x", true));
    if (x < left || x > left + width) continue;
    u.ctx.strokeStyle = css(MARK_COLORS[kind]);
    u.ctx.beginPath();
    u.ctx.moveTo(x, top);
    u.ctx.lineTo(x, top + height);
    u.ctx.stroke();
  }
  u.ctx.restore();
}

function fade(u, color) {
  const { top, height } = u.bbox;
  const gradient = u.ctx.createLinearGradient(0, top, 0, top + height);
  gradient.addColorStop(0, `color-mix(in srgb, ${color} 30%, transparent)`);
  gradient.addColorStop(1, `color-mix(in srgb, ${color} 2%, transparent)`);
  return gradient;
}

function times(u, marks, axis, space, step) {
  const days = step >= 86400, seconds = step < 60;
  return marks.map((mark) => {
    const when = new Date(mark * 1000);
    if (days || (step >= 3600 && when.getHours() === 0 && when.getMinutes() === 0)) return when.toLocaleDateString([], { month: "short", day: "numeric" });
    return when.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: seconds ? "2-digit" : undefined, hour12: false });
  });
}
