// What is known about a run besides curves and samples: summary, stages, alerts, configuration, explanations.
import { runColor } from "./chart.js";
import { el, note, number, seconds, shown } from "./dom.js";

const STATES = {
  running: ["●", "running", "ok"],
  done: ["✓", "done", "ok"],
  stopped: ["■", "stopped", ""],
  failed: ["✕", "failed", "bad"],
  unsaved: ["!", "not saved", "bad"],
  silent: ["◌", "no summary: killed, or silent", "bad"],
  unreadable: ["✕", "cannot be read", "bad"],
  empty: ["◌", "nothing yet", ""],
};

export function state(run) {
  const [mark, word, kind] = STATES[run.status] ?? ["•", run.status, ""];
  return el("span", { className: `state ${kind}` }, el("span", { "aria-hidden": "true" }, `${mark} `), shown(word));
}

export function summaryCard(found, alerts = []) {
  const { run, summary, evaluations } = found;
  const facts = [["Status", state(run)]];
  const total = run.total ? ` of ${number(run.total, 7)}` : "";
  if (run.last.step !== undefined) facts.push(["Step", `${number(run.last.step, 7)}${total}`]);
  const scores = evaluations.filter((entry) => ["before", "after"].includes(entry.name));
  for (const entry of scores) facts.push([`Held-out ${entry.name}`, score(entry)]);
  if (run.last.reward_mean !== undefined) facts.push(["Reward", number(run.last.reward_mean)]);
  if (summary?.seconds !== undefined) facts.push(["Time", seconds(summary.seconds)]);
  const about = [run.kind, summary?.algo, summary?.task, run.device, run.seed === null ? null : `seed ${run.seed}`, run.writer ?? (run.novarl ? `NovaRL ${run.novarl}` : null)];
  return el(
    "section",
    { className: "summary" },
    el("h2", {}, shown(run.name), el("span", { className: "faint about" }, " ", shown(about.filter(Boolean).join(" · ")))),
    el("dl", { className: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    alerts.slice(-2).map((alert) => el("p", { className: "error" }, el("b", {}, `▲ step ${alert.step} `), shown(alert.message))),
    [...run.notes, ...found.damaged].map((text) => note(text)),
  );
}

function score(entry) {
  const [low, high] = entry.interval ?? [];
  const range = typeof low === "number" ? el("small", {}, ` ${number(low, 3)} – ${number(high, 3)}`) : null;
  return el("span", {}, number(entry.score, 3), range);
}

// Where the time of an update goes. `step` is the whole, the other stages may overlap.
export function stagesCard({ stages, memory_mb: memory, updates, phase }) {
  const whole = stages.step;
  const named = Object.entries(stages).filter(([name]) => name !== "step").sort((one, other) => other[1] - one[1]);
  const most = Math.max(whole ?? 0, ...named.map(([, value]) => value));
  if (!named.length && !Object.keys(memory).length) return null;
  const bars = named.map(([name, value]) => {
    const bar = el("span", { className: "bar" });
    bar.style.width = `${(100 * value) / most}%`;
    const share = whole ? ` ${Math.round((100 * value) / whole)}%` : "";
    return el("div", { className: "stage" }, el("dt", {}, shown(name)), el("dd", {}, el("span", { className: "track" }, bar), el("span", { className: "num" }, seconds(value), el("small", {}, share))));
  });
  const kept = Object.entries(memory).map(([name, value]) =>
    el("div", { className: "stage" }, el("dt", {}, name === "memory_rss_mb" ? "memory" : "device memory"), el("dd", {}, el("span", { className: "num" }, `${number(Math.round(value.last))} MB`, el("small", {}, ` peak ${number(Math.round(value.most))} MB`)))),
  );
  const about = `Mean over the last ${updates} updates of phase ${phase}; stages may overlap${whole ? `; a step takes ${seconds(whole)}` : ""}.`;
  return el("section", { className: "stages" }, el("h3", {}, "Time and memory"), el("dl", {}, bars, kept), el("p", { className: "faint" }, shown(about)));
}

export function alertList(found, onStep = null) {
  const refused = Object.values(found.unreadable ?? {}).map((text) => note(text, "error"));
  if (!found.alerts.length) return el("div", {}, refused, el("p", { className: "faint" }, "No alerts."));
  const several = new Set(found.alerts.map((alert) => alert.run)).size > 1;
  const items = found.alerts.map((alert) => {
    const where = alert.kind === "finding" ? "at the end" : `${alert.phase ?? "start"}, step ${alert.step}`;
    const link = alert.kind === "alert" && alert.step > 0 && onStep;
    return el(
      "li",
      { className: alert.kind },
      el("div", { className: "where" }, several ? el("b", {}, shown(alert.run), " ") : null, link ? el("button", { type: "button", className: "link", onclick: () => onStep(alert) }, shown(where)) : shown(where)),
      el("div", {}, shown(alert.message)),
    );
  });
  return el("div", {}, refused, el("ul", { className: "alerts" }, items));
}

// The configurations of `found.runs` as columns; `differing` leaves out equal rows, `words` filters keys and values.
export function configTable(found, differing, words) {
  const sought = words.toLowerCase();
  const rows = found.rows.filter((row) => (!differing || row.differs) && (!sought || `${row.key} ${row.values.join(" ")}`.toLowerCase().includes(sought)));
  const absent = Object.entries(found.absent).map(([run, why]) => note(`${run}: ${why}`));
  if (!rows.length) {
    const said = !found.runs.length ? "No configuration." : differing && !sought ? "The configurations are equal." : "No key matches.";
    return el("div", {}, absent, el("p", { className: "faint" }, said));
  }
  return el(
    "div",
    { className: "scroll" },
    absent,
    el(
      "table",
      { className: "config" },
      found.runs.length > 1 ? el("thead", {}, el("tr", {}, el("th", {}, "Key"), found.runs.map((run) => el("th", {}, shown(run))))) : null,
      el("tbody", {}, rows.map((row) => el("tr", { className: row.differs && !differing ? "differs" : "" }, el("th", { scope: "row" }, row.differs && !differing ? el("span", { className: "mark", title: "differs" }, "≠ ") : null, shown(row.key)), row.values.map((value) => el("td", {}, shown(value)))))),
    ),
  );
}

export function explanation(metric) {
  const facts = [["Formula", metric.formula], ["Unit", metric.unit], ["Healthy", metric.healthy], ["Better", { up: "higher", down: "lower" }[metric.direction]]];
  const known = facts.filter(([, text]) => text);
  if (!known.length) return el("p", { className: "explanation faint" }, "Not in the glossary: another program's metric.");
  return el("dl", { className: "explanation" }, known.map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, shown(text)))));
}

// Whether the last value of a curve is outside its healthy range, in words.
export function outside(metric, value) {
  if (!metric.range || typeof value !== "number") return null;
  const [low, high] = metric.range;
  if (high !== null && value > high) return `above ${number(high)}`;
  if (low !== null && value < low) return `below ${number(low)}`;
  return null;
}

export function panelHead(metric, badges) {
  const details = el("details", { className: "about" }, el("summary", { title: "What it is" }, el("h4", {}, shown(metric.name)), el("span", { className: "unit" }, metric.unit === "1" ? "" : shown(metric.unit))), explanation(metric));
  const warned = badges.map(([place, text, several]) => {
    const mark = several ? el("span", { className: "swatch" }) : null;
    if (mark) mark.style.background = runColor(place);
    return el("span", { className: "badge", title: `The last value is outside the healthy range: ${metric.healthy}` }, mark, `▲ ${text}`);
  });
  return el("header", {}, details, el("span", { className: "badges" }, warned));
}
