// One metric of one or several runs as curves, with its healthy range and the alerts on the axis of steps.
import { el, number, shown } from "./dom.js";

// Okabe and Ito's colors, which people with any color vision can tell apart; a second round of them is dashed.
const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#b65c93", "#c88a00", "#3a9ad0", "#6b6b6b"];
const DARK = ["#56b4e9", "#f28e4c", "#2fc79a", "#dd9cc0", "#f0c04a", "#a3d5f2", "#b5b5b5"];

export function darkNow() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export function runColor(place) {
  const palette = darkNow() ? DARK : LIGHT;
  return palette[place % palette.length];
}

export function runDash(place) {
  return [undefined, [7, 4], [2, 3]][Math.floor(place / LIGHT.length) % 3];
}

function inkOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// The points of a curve with a gap wherever the value was NaN or infinite.
function withGaps(curve) {
  if (!curve.nonfinite.length) return [curve.x, curve.y];
  const points = curve.x.map((x, place) => [x, curve.y[place]]).concat(curve.nonfinite.map((x) => [x, null]));
  points.sort((one, other) => one[0] - other[0]);
  return [points.map((point) => point[0]), points.map((point) => point[1])];
}

// A chart. `curves` is [{place, label, curve}], `alerts` [{step, message}], `range` [low, high] of the healthy values.
export class Chart {
  constructor(box, { metric, log = false, onPick = null }) {
    Object.assign(this, { box, metric, log, onPick, plot: null, curves: [], alerts: [], smooth: true });
    this.said = el("div", { className: "said" });
    this.canvas = el("div", { className: "canvas", role: "img" });
    box.append(this.canvas, this.said);
    this.watcher = new ResizeObserver(() => this.fit());
    this.watcher.observe(this.canvas);
  }

  show(curves, alerts, smooth) {
    const same = this.plot && this.smooth === smooth && this.key(curves) === this.key(this.curves);
    Object.assign(this, { curves, alerts, smooth });
    const last = curves.map(({ label, curve }) => `${label}: ${number(curve.y.at(-1))}`).join(", ");
    this.canvas.setAttribute("aria-label", `${this.metric.name}; last values: ${last}`);
    if (same) this.plot.setData(this.data());
    else this.draw();
    this.tell(null);
  }

  key(curves) {
    return curves.map(({ place, label, curve }) => `${place} ${label} ${Boolean(curve.smooth)}`).join("|") + darkNow() + this.log;
  }

  smoothed(curve) {
    return this.smooth && curve.smooth;
  }

  data() {
    const tables = [];
    for (const { curve } of this.curves) {
      tables.push(withGaps(curve));
      if (this.smoothed(curve)) tables.push([curve.smooth.x, curve.smooth.y]);
    }
    const clean = (values) => (this.log ? values.map((value) => (value > 0 ? value : null)) : values);
    const gaps = 2; // uPlot: a null is a gap up to the curve's neighbouring points, not only at its place
    return tables.length ? uPlot.join(tables.map(([x, y]) => [x, clean(y)]), tables.map(() => [0, gaps])) : [[]];
  }

  draw() {
    this.plot?.destroy();
    const grid = { stroke: inkOf("--line"), width: 1 };
    const axis = { stroke: inkOf("--soft"), grid, ticks: { ...grid, size: 4 }, font: "11px system-ui, sans-serif", gap: 4 };
    const series = [{}];
    for (const { place, label, curve } of this.curves) {
      const stroke = runColor(place);
      const points = { show: curve.x.length < 40, size: 5, fill: stroke };
      const over = Boolean(this.smoothed(curve));
      series.push({ label, stroke: over ? `${stroke}55` : stroke, width: over ? 1 : 1.75, dash: runDash(place), points });
      if (over) series.push({ label, stroke, width: 2, dash: runDash(place), points: { show: false } });
    }
    this.plot = new uPlot(
      {
        width: Math.max(120, this.canvas.clientWidth),
        height: 168,
        series,
        legend: { show: false },
        cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false }, sync: { key: "steps" } },
        scales: { x: { time: false }, y: { distr: this.log ? 3 : 1, range: this.log ? undefined : padded } },
        axes: [
          { ...axis, grid: { show: false }, size: 26 },
          { ...axis, size: 54, values: (_, values) => values.map((value) => (value === null ? "" : number(value, 3))) },
        ],
        hooks: { drawClear: [(plot) => this.drawBand(plot)], draw: [(plot) => this.drawAlerts(plot)], setCursor: [(plot) => this.tell(plot)] },
      },
      this.data(),
      this.canvas,
    );
    this.plot.over.addEventListener("click", () => {
      const at = this.plot.posToVal(this.plot.cursor.left, "x");
      this.onPick?.(Math.max(1, Math.round(at)));
    });
  }

  fit() {
    const width = this.canvas.clientWidth;
    if (this.plot && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: 168 });
  }

  drawBand(plot) {
    if (!this.metric.range) return;
    const [low, high] = this.metric.range;
    const { left, top, width, height } = plot.bbox;
    const at = (value, other) => {
      if (value === null || (this.log && value <= 0)) return other;
      return Math.min(top + height, Math.max(top, plot.valToPos(value, "y", true)));
    };
    const [above, below] = [at(high, top), at(low, top + height)];
    plot.ctx.save();
    plot.ctx.fillStyle = inkOf("--band");
    plot.ctx.fillRect(left, above, width, Math.max(0, below - above));
    plot.ctx.strokeStyle = inkOf("--limit");
    plot.ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    plot.ctx.beginPath();
    for (const [value, y] of [[high, above], [low, below]]) {
      if (value === null || y <= top || y >= top + height) continue;
      plot.ctx.moveTo(left, y);
      plot.ctx.lineTo(left + width, y);
    }
    plot.ctx.stroke();
    plot.ctx.restore();
  }

  drawAlerts(plot) {
    const { left, top, width, height } = plot.bbox;
    const size = 4 * devicePixelRatio;
    plot.ctx.save();
    plot.ctx.strokeStyle = plot.ctx.fillStyle = inkOf("--alert");
    plot.ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const alert of this.alerts) {
      const x = plot.valToPos(alert.step, "x", true);
      if (x < left || x > left + width) continue;
      plot.ctx.beginPath();
      plot.ctx.moveTo(x, top);
      plot.ctx.lineTo(x, top + height);
      plot.ctx.stroke();
      plot.ctx.beginPath();
      plot.ctx.moveTo(x - size, top);
      plot.ctx.lineTo(x + size, top);
      plot.ctx.lineTo(x, top + 1.6 * size);
      plot.ctx.fill();
    }
    plot.ctx.restore();
  }

  // The values under the cursor, or the last ones.
  tell(plot) {
    const at = plot?.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : null;
    const parts = this.curves.slice(0, 8).map(({ place, label, curve }) => {
      const index = at === null ? curve.x.length - 1 : nearest(curve.x, at);
      const mark = el("span", { className: "swatch" });
      mark.style.background = runColor(place);
      const name = this.curves.length > 1 ? el("span", { className: "faint" }, shown(label), " ") : null;
      const odd = curve.nonfinite_count ? el("span", { className: "warn" }, ` ${curve.nonfinite_count} not finite`) : null;
      return el("span", { className: "value" }, mark, name, index < 0 ? "no value" : number(curve.y[index]), odd);
    });
    if (this.curves.length > 8) parts.push(el("span", { className: "faint" }, `and ${this.curves.length - 8} more`));
    const step = at === null ? "last" : `step ${number(Math.max(0, Math.ceil(at - 1e-9)), 9)}`;
    const close = at === null ? null : this.alerts.find((alert) => Math.abs(plot.valToPos(alert.step, "x") - plot.cursor.left) < 6);
    const warned = close ? el("span", { className: "warn" }, "▼ ", shown(close.message)) : null;
    this.said.replaceChildren(el("span", { className: "faint step" }, step), ...parts, ...(warned ? [warned] : []));
  }

  end() {
    this.watcher.disconnect();
    this.plot?.destroy();
  }
}

// A constant curve gets room above and below.
function padded(_, low, high) {
  if (low === null || high === null) return [0, 1];
  const room = high > low ? (high - low) * 0.08 : Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

function nearest(values, at) {
  let [low, high] = [0, values.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < at) low = middle + 1;
    else high = middle;
  }
  return low > 0 && at - values[low - 1] < values[low] - at ? low - 1 : low;
}
