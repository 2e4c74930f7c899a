// The tokens of an answer, colored by one measure; a click shows all measures of a token.
import { el, number, shown } from "./dom.js";

const difference = (one, other) => (one === undefined || other === undefined ? undefined : one - other);
const k3 = (d) => (d === undefined ? undefined : Math.exp(-d) - 1 + d);

// name, title, value of token `at` of `columns`; `signed` measures use two hues, the others one.
export const MEASURES = [
  { name: "advantage", title: "Advantage", signed: true, of: (c, at) => c.advantages?.[at] },
  { name: "ratio", title: "Log-prob ratio (new − old policy)", signed: true, of: (c, at) => difference(c.logp?.[at], c.old_logp?.[at]) },
  { name: "kl", title: "KL to the reference (k1)", signed: true, of: (c, at) => difference((c.logp ?? c.old_logp)?.[at], c.ref_logp?.[at]) },
  { name: "entropy", title: "Entropy", signed: false, of: (c, at) => c.entropy?.[at] },
  { name: "mismatch", title: "Sampler − learner difference", signed: true, of: (c, at) => difference(c.old_logp?.[at], c.behavior_logp?.[at]) },
  { name: "value", title: "Value", signed: true, of: (c, at) => c.values?.[at] },
  { name: "process", title: "Process reward", signed: true, of: (c, at) => c.token_reward?.[at] },
  { name: "return", title: "Return", signed: true, of: (c, at) => c.returns?.[at] },
  { name: "loss", title: "Loss term", signed: true, of: (c, at) => c.loss?.[at] },
];

const DETAILS = [
  ["Advantage", "", (c, at) => c.advantages?.[at]],
  ["Loss term", "nats", (c, at) => c.loss?.[at]],
  ["Probability", "", (c, at) => (c.logp ?? c.old_logp)?.[at] === undefined ? undefined : Math.exp((c.logp ?? c.old_logp)[at])],
  ["log π, at the first update", "nats", (c, at) => c.logp?.[at]],
  ["log π old, before the step", "nats", (c, at) => c.old_logp?.[at]],
  ["log μ, as sampled", "nats", (c, at) => c.behavior_logp?.[at]],
  ["log π ref", "nats", (c, at) => c.ref_logp?.[at]],
  ["Ratio π / π old", "", (c, at) => c.logp?.[at] === undefined || c.old_logp?.[at] === undefined ? undefined : Math.exp(c.logp[at] - c.old_logp[at])],
  ["KL to the reference, k1", "nats", (c, at) => difference((c.logp ?? c.old_logp)?.[at], c.ref_logp?.[at])],
  ["KL to the reference, k3", "nats", (c, at) => k3(difference((c.logp ?? c.old_logp)?.[at], c.ref_logp?.[at]))],
  ["Sampler − learner difference", "nats", (c, at) => difference(c.old_logp?.[at], c.behavior_logp?.[at])],
  ["Entropy", "nats", (c, at) => c.entropy?.[at]],
  ["Value", "reward", (c, at) => c.values?.[at]],
  ["Return", "reward", (c, at) => c.returns?.[at]],
  ["Process reward", "reward", (c, at) => c.token_reward?.[at]],
];

export function measureNamed(name) {
  return MEASURES.find((measure) => measure.name === name) ?? MEASURES[0];
}

// The level of a value: p1…p4 above zero, n1…n4 below; q1…q4 for measures of one hue.
export function level(measure, value, full) {
  if (value === undefined || value === null || !Number.isFinite(value) || !(full > 0)) return "";
  const share = Math.min(1, Math.abs(value) / full);
  if (share < 0.02) return "";
  const kind = measure.signed ? (value > 0 ? "p" : "n") : "q";
  return `${kind}${Math.min(4, 1 + Math.floor(share * 4 - 1e-9))}`;
}

// Tokens `from` to `to` of an answer.
export function tokenLine(answer, from, to, measure, scales, onPick) {
  const columns = answer.columns;
  const line = el("span", { className: "tokens", role: "group", "aria-label": "tokens" });
  for (let at = from; at < to; at += 1) {
    const piece = columns.pieces?.[at];
    const value = measure.of(columns, at);
    const token = el("span", {
      className: `t ${level(measure, value, scales[measure.name]?.full)}`,
      tabIndex: at === from ? 0 : -1,
      title: value === undefined ? "" : `${measure.title}: ${number(value)}`,
    });
    token.dataset.at = at;
    if (piece === undefined) token.append(`⟨${columns.tokens?.[at] ?? "?"}⟩`);
    else if (piece === "") token.append(el("span", { className: "code" }, "·"));
    else if (piece.includes("\n")) token.append(...broken(piece));
    else token.append(shown(piece));
    line.append(token);
  }
  const pick = (token) => {
    line.closest("body")?.querySelectorAll(".t.picked").forEach((other) => other.classList.remove("picked"));
    token.classList.add("picked");
    onPick(answer, Number(token.dataset.at));
  };
  line.addEventListener("click", (event) => {
    const token = event.target.closest(".t");
    if (token) pick(token);
  });
  line.addEventListener("keydown", (event) => {
    const token = event.target.closest(".t");
    if (!token) return;
    const next = { ArrowRight: token.nextElementSibling, ArrowLeft: token.previousElementSibling }[event.key];
    if (event.key === "Enter") pick(token);
    else if (next) {
      next.focus();
      if (token.classList.contains("picked")) pick(next);
    } else if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
    event.stopPropagation();
  });
  return line;
}

function broken(piece) {
  const parts = piece.split("\n");
  return parts.flatMap((part, place) => (place ? [el("span", { className: "code" }, "↵"), "\n", shown(part)] : [shown(part)]));
}

// What the colors mean, with the values at which they are full.
export function legend(measure, scales) {
  const scale = scales[measure.name];
  if (!scale) return el("span", { className: "legend faint" }, `${measure.title}: not recorded in this step`);
  if (!scale.full) return el("span", { className: "legend faint" }, `${measure.title}: 0 ${scale.most ? "for nearly all tokens" : "everywhere"} in this step`);
  const cells = measure.signed ? ["n4", "n3", "n2", "n1", "", "p1", "p2", "p3", "p4"] : ["", "q1", "q2", "q3", "q4"];
  const full = number(scale.full, 3);
  return el(
    "span",
    { className: "legend", title: `Full color at the 98th percentile; the largest is ${number(scale.most)}` },
    el("span", { className: "num" }, measure.signed ? `−${full}` : "0"),
    cells.map((cell) => el("span", { className: `t cell ${cell}` }, "ab")),
    el("span", { className: "num" }, full),
  );
}

// Everything that is known about one token.
export function inspector(answer, at, onClose) {
  const columns = answer.columns;
  const rows = DETAILS.map(([title, unit, of]) => [title, unit, of(columns, at)]);
  const id = columns.tokens?.[at];
  return el(
    "section",
    { className: "inspector", "aria-label": "Token" },
    el(
      "header",
      {},
      el("strong", {}, "Token "),
      el("code", { className: "piece" }, shown(JSON.stringify(columns.pieces?.[at] ?? ""))),
      el("span", { className: "faint" }, ` ${at + 1} of ${answer.length}, id ${id ?? "–"}, answer ${answer.index}`),
      el("button", { className: "quiet", type: "button", onclick: onClose, title: "Close (Esc)" }, "Close"),
    ),
    el(
      "dl",
      {},
      rows.map(([title, unit, value]) => [
        el("div", { className: value === undefined ? "absent" : "" }, el("dt", {}, title), el("dd", {}, value === undefined ? "not recorded" : number(value, 5), value === undefined ? "" : el("small", {}, ` ${unit}`))),
      ]),
    ),
  );
}
