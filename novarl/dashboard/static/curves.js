// The view of curves: summary, stages, and a panel per metric. A panel asks for its points when it comes into view.
import { Chart } from "./chart.js";
import { atMost, el, note, plural, settled, shown } from "./dom.js";
import { outside, panelHead, stagesCard, summaryCard } from "./facts.js";

const AT_ONCE = 60;

export class CurvesView {
  constructor(app) {
    this.app = app;
    this.panels = new Map(); // metric: panel
    this.points = new Map(); // run: {metric: curve}
    this.wanted = new Set();
    this.words = "";
    this.smooth = true;
    this.phase = "";
    this.fetchSoon = settled(() => this.fetch([...this.wanted], this.app.selected()), 30);
    this.sight = new IntersectionObserver((entries) => this.seen(entries), { rootMargin: "300px" });
    this.build();
  }

  build() {
    this.filter = el("input", { type: "search", placeholder: "Find a metric  ( / )", "aria-label": "Find a metric", value: this.words });
    this.filter.addEventListener("input", () => this.layout());
    this.phases = el("select", { "aria-label": "Phase" });
    this.phases.addEventListener("change", () => {
      this.phase = this.phases.value;
      this.points.clear();
      this.open();
    });
    const smooth = el("input", { type: "checkbox", checked: this.smooth });
    smooth.addEventListener("change", () => {
      this.smooth = smooth.checked;
      this.redraw();
    });
    this.head = el("div", { className: "cards" });
    this.progress = el("span", { className: "faint", role: "status" });
    this.body = el("div", {});
    this.root = el(
      "div",
      { className: "curves" },
      this.head,
      el("div", { className: "tools" }, this.filter, el("label", {}, "Phase ", this.phases), el("label", { className: "check" }, smooth, "Smooth"), this.progress),
      this.body,
    );
  }

  search() {
    this.filter.focus();
  }

  // Everything anew: another selection of runs.
  async open() {
    const names = this.app.selected();
    const [found, stages, told] = await Promise.all([
      Promise.all(names.map((name) => this.app.ask("/api/run", { run: name }).catch((error) => ({ error, name })))),
      this.app.ask("/api/stages", { run: this.app.state.run }).catch(() => null),
      this.app.ask("/api/alerts", { run: names }),
    ]);
    this.found = found.filter((run) => !run.error);
    const errors = found.filter((run) => run.error).map((run) => note(run.error.message, "error"));
    const current = this.found.find((run) => run.run.name === this.app.state.run);
    this.alerts = told.alerts.filter((alert) => alert.kind === "alert" && alert.step > 0);
    const own = this.alerts.filter((alert) => alert.run === current?.run.name);
    this.head.replaceChildren(...errors, ...(current ? [summaryCard(current, own)] : []), ...(stages ? [stagesCard(stages)].filter(Boolean) : []));
    const phases = [...new Set(this.found.flatMap((run) => run.phases))];
    this.phases.replaceChildren(el("option", { value: "" }, "last"), ...phases.map((phase) => el("option", { value: phase }, shown(phase))));
    this.phases.value = phases.includes(this.phase) ? this.phase : "";
    this.phase = this.phases.value;
    const metrics = new Map();
    for (const run of this.found) {
      const names = new Set(run.names[this.phase || run.phases.at(-1)]);
      for (const metric of run.metrics) if (names.has(metric.name) && !metrics.has(metric.name)) metrics.set(metric.name, metric);
    }
    const known = [...metrics.keys()].join("|");
    if (known !== this.known) {
      this.known = known;
      this.metrics = [...metrics.values()];
      this.layout();
    } else this.redraw();
    this.fetchSoon();
  }

  layout() {
    this.words = this.filter.value;
    const sought = this.words.toLowerCase();
    for (const panel of this.panels.values()) panel.chart?.end();
    this.sight.disconnect();
    this.panels.clear();
    this.wanted.clear();
    const sections = new Map();
    for (const metric of this.metrics ?? []) {
      if (sought && !`${metric.name} ${metric.section}`.toLowerCase().includes(sought)) continue;
      const title = metric.key ? "Overview" : metric.section;
      sections.set(title, [...(sections.get(title) ?? []), metric]);
    }
    const parts = [...sections].map(([title, metrics]) => {
      const panels = metrics.map((metric) => this.panel(metric));
      return el("details", { className: "section", open: true }, el("summary", {}, el("h2", {}, title), el("span", { className: "faint" }, ` ${metrics.length}`)), el("div", { className: "panels" }, panels));
    });
    if (!parts.length) parts.push(el("p", { className: "faint empty" }, this.metrics?.length ? "No metric matches." : "No metrics yet: the run has made no update."));
    this.body.replaceChildren(...parts);
  }

  panel(metric) {
    const box = el("section", { className: "panel", "data-metric": metric.name });
    this.panels.set(metric.name, { metric, box, chart: null });
    this.sight.observe(box);
    return box;
  }

  seen(entries) {
    for (const entry of entries) {
      const name = entry.target.dataset.metric;
      if (!entry.isIntersecting) this.wanted.delete(name);
      else {
        this.wanted.add(name);
        this.draw(name);
      }
    }
    const missing = [...this.wanted].some((name) => this.app.selected().some((run) => !this.points.get(run)?.[name]));
    if (missing) this.fetchSoon();
  }

  async fetch(metrics, runs) {
    if (!metrics.length) return;
    const count = this.app.selected().length;
    const points = count <= 3 ? 600 : count <= 8 ? 360 : 200; // a chart's work is the square of the runs
    await Promise.all(
      runs.map(async (run) => {
        const found = await this.app.ask("/api/curves", { run, metric: metrics.slice(0, AT_ONCE), phase: this.phase, points }).catch(() => null);
        if (!found) return;
        this.points.set(run, { ...this.points.get(run), ...found.series, " progress": found.progress });
        this.drawSoon();
      }),
    );
  }

  drawSoon() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.redraw();
    });
  }

  redraw() {
    for (const name of this.wanted) this.draw(name);
    const reading = this.app.selected().filter((run) => (this.points.get(run)?.[" progress"] ?? 1) < 1).length;
    this.progress.textContent = reading ? `reading ${plural(reading, "large file")}; until then the curves are samples` : "";
  }

  draw(name) {
    const panel = this.panels.get(name);
    if (!panel) return;
    const runs = this.app.selected();
    const curves = runs.map((run) => ({ place: this.app.place(run), label: run, curve: this.points.get(run)?.[name] })).filter(({ curve }) => curve?.x.length || curve?.nonfinite.length);
    const badges = curves.map(({ place, curve }) => [place, outside(panel.metric, curve.y.at(-1)), curves.length > 1]).filter(([, text]) => text);
    const told = JSON.stringify(badges);
    if (!panel.head) {
      panel.head = el("div", {});
      panel.box.append(panel.head);
    }
    if (!panel.chart && curves.length) {
      panel.chart = new Chart(panel.box, { metric: panel.metric, log: panel.metric.log, onPick: (step) => this.app.openStep(step) });
    }
    if (told !== panel.told) {
      panel.told = told;
      const open = panel.head.querySelector("details")?.open;
      panel.head.replaceChildren(panelHead(panel.metric, badges));
      panel.head.querySelector("details").open = Boolean(open);
    }
    if (!curves.length && runs.some((run) => !this.points.get(run)?.[name])) return; // an empty chart would look like no data
    const phases = new Set(this.phase ? [this.phase] : (this.found ?? []).map((run) => run.phases.at(-1)));
    const alerts = (this.alerts ?? []).filter((alert) => phases.has(alert.phase));
    panel.chart?.show(curves, alerts, this.smooth);
  }

  async changed(runs) {
    const shownRuns = runs.filter((run) => this.app.selected().includes(run));
    if (!shownRuns.length) return;
    await this.fetch([...this.wanted], shownRuns);
    this.openSoon ??= atMost(() => this.open().catch(() => {}), 1000);
    this.openSoon();
  }

  key() {
    return false;
  }
}
