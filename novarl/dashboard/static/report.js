// The page of `novarl report`: everything comes from the block of JSON in the file.
import { Chart } from "./chart.js";
import { el, note, plural, shown } from "./dom.js";
import { alertList, configTable, outside, panelHead, stagesCard, summaryCard } from "./facts.js";
import { groupView } from "./answers.js";
import { inspector, legend, measureNamed, MEASURES } from "./tokens.js";

const data = JSON.parse(document.getElementById("data").textContent);

function part(title, ...children) {
  return el("section", { className: "part" }, el("h2", {}, title), children);
}

function curvesPart() {
  const phases = [...data.run.phases].reverse();
  const first = phases.length ? phases[0] : null;
  const blocks = phases.map((phase) => {
    const { series } = data.curves[phase];
    const panels = data.run.metrics
      .filter((metric) => series[metric.name]?.x.length || series[metric.name]?.nonfinite.length)
      .map((metric) => [metric, series[metric.name]]);
    const box = el("div", { className: "panels" });
    const details = el("details", { className: "section", open: phase === first }, el("summary", {}, el("h2", {}, "Phase ", shown(phase)), el("span", { className: "faint" }, ` ${plural(panels.length, "metric")}`)), box);
    const draw = () => {
      if (!details.open || box.firstChild) return;
      for (const [metric, curve] of panels) {
        const panel = el("section", { className: "panel", "data-metric": metric.name });
        const text = outside(metric, curve.y.at(-1));
        panel.append(panelHead(metric, text ? [[0, text, false]] : []));
        box.append(panel);
        const alerts = data.alerts.alerts.filter((alert) => alert.kind === "alert" && alert.step > 0 && alert.phase === phase);
        new Chart(panel, { metric, log: metric.log }).show([{ place: 0, label: data.run.run.name, curve }], alerts, true);
      }
    };
    details.addEventListener("toggle", draw);
    return [details, draw];
  });
  return [blocks.length ? blocks.map(([details]) => details) : el("p", { className: "faint" }, "The run has made no update."), () => blocks.forEach(([, draw]) => draw())];
}

function samplesPart() {
  if (!data.samples.length) return el("p", { className: "faint" }, data.steps_logged ? "None were asked for." : "The run has no rollouts.");
  const color = el("select", { "aria-label": "Color tokens by" }, MEASURES.map((measure) => el("option", { value: measure.name }, measure.title)));
  const sheet = el("div", { className: "sheet" });
  const body = el("div", {});
  const legends = el("span", {});
  const draw = () => {
    const measure = measureNamed(color.value);
    const newest = data.samples.at(-1);
    legends.replaceChildren(newest.groups.length ? legend(measure, newest.groups[0].scales) : "");
    body.replaceChildren(
      ...data.samples.map((sample, place) => {
        const onPick = (answer, at) => sheet.replaceChildren(inspector(answer, at, () => sheet.replaceChildren()));
        const groups = sample.groups.map((group) => groupView(group, measure, { onPick }));
        const said = sample.error ? note(sample.error, "error") : null;
        const open = opened.get(place) ?? place === data.samples.length - 1;
        const box = el("details", { className: "stepbox", open }, el("summary", {}, `Step ${sample.step}`, sample.error ? null : el("span", { className: "faint" }, `  ${groups.length} of ${plural(sample.groups_total, "group")}`)), said, groups);
        box.addEventListener("toggle", () => opened.set(place, box.open));
        return box;
      }),
    );
  };
  const opened = new Map();
  color.addEventListener("change", draw);
  draw();
  return [el("div", { className: "tools" }, el("label", {}, "Color ", color), legends), body, sheet];
}

function configPart() {
  const filter = el("input", { type: "search", placeholder: "Find a key or value", "aria-label": "Find a key or value" });
  const body = el("div", {});
  const draw = () => body.replaceChildren(configTable(data.config, false, filter.value));
  filter.addEventListener("input", draw);
  draw();
  return [el("div", { className: "tools" }, filter), body];
}

const [curves, drawCurves] = curvesPart();
document.getElementById("main").replaceChildren(
  el("h1", {}, "Report of ", shown(data.run.run.name)),
  el("p", { className: "faint" }, shown(`Written ${data.written} by NovaRL ${data.version} from ${data.run.run.path}`)),
  el("div", { className: "cards" }, summaryCard(data.run), stagesCard(data.stages)),
  part("Alerts and findings", alertList(data.alerts)),
  part("Curves", curves),
  part("Samples", samplesPart()),
  part("Configuration", configPart()),
);
document.title = `${data.run.run.name} · NovaRL report`;
drawCurves();
