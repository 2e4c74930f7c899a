// The answers of a group side by side: rewards, conversation, tokens.
import { el, note, number, plural, shown } from "./dom.js";
import { tokenLine } from "./tokens.js";

export function rewardText(value) {
  return value === null || value === undefined ? "no reward" : number(value);
}

// The prompt and the answers. `onPick(answer, token)`; `more(answer)` loads the rest of a long answer.
export function groupView(group, measure, { onPick, more = null, only = false }) {
  const answers = only ? group.answers.filter((answer) => answer.matches) : group.answers;
  const first = group.answers[0];
  const asked = promptOf(first);
  return el(
    "div",
    { className: "group" },
    el(
      "section",
      { className: "prompt" },
      el("h3", {}, "Prompt", group.prompt_id ? el("span", { className: "faint" }, " ", shown(group.prompt_id)) : null),
      asked.length > 1 || (asked.length && asked[0].role !== "user") ? asked.map(message) : el("div", { className: "text" }, shown(group.prompt)),
      group.reference === null || group.reference === undefined
        ? null
        : el("p", { className: "reference" }, el("span", { className: "faint" }, "Reference answer "), shown(group.reference)),
    ),
    el("div", { className: "answers" }, answers.map((answer) => card(answer, group, measure, onPick, more))),
  );
}

function card(answer, group, measure, onPick, more) {
  const named = Object.entries(answer.rewards ?? {});
  const failed = answer.status === "failed";
  return el(
    "article",
    { className: `answer ${answer.matches ? "" : "unmatched"} ${failed ? "failed" : ""}`, "data-index": answer.index },
    el(
      "header",
      {},
      el("span", { className: "index" }, `#${answer.index}`),
      el("strong", { className: "reward" }, rewardText(answer.reward)),
      answer.advantage === null ? null : el("span", { className: `adv ${answer.advantage > 0 ? "up" : answer.advantage < 0 ? "down" : ""}` }, `adv ${signed(answer.advantage)}`),
      el("span", { className: "chips" }, chips(answer)),
    ),
    named.length
      ? el("dl", { className: "rewards" }, named.map(([name, value]) => el("div", {}, el("dt", {}, shown(name)), el("dd", {}, number(value)))))
      : null,
    answer.error ? note(answer.error, "error") : null,
    conversation(answer, group, measure, onPick),
    rest(answer, more),
    Object.keys(answer.extra ?? {}).length ? el("details", {}, el("summary", {}, "Logged values"), el("pre", {}, shown(JSON.stringify(answer.extra, null, 1)))) : null,
  );
}

function signed(value) {
  const text = number(value, 3);
  return value > 0 ? `+${text}` : text;
}

function chips(answer) {
  const found = [];
  if (answer.role !== "train") found.push([answer.role, "never trained on"]);
  if (answer.status !== "done") found.push([answer.status, "status"]);
  if (answer.finish_reason && answer.finish_reason !== "stop") found.push([answer.finish_reason, "finish reason"]);
  found.push([answer.length === null ? plural(answer.characters, "character") : plural(answer.length, "token"), "length"]);
  if (answer.length === null) found.push(["no tokens recorded", "not trained on, or the writer recorded no tokens"]);
  return found.map(([text, title]) => el("span", { className: "chip", title }, shown(text)));
}

function rest(answer, more) {
  const sent = answer.columns.tokens?.length ?? 0;
  if (!sent || sent >= answer.length) return null;
  const said = `${plural(answer.length - sent, "more token")} of ${answer.length.toLocaleString("en")}`;
  return more ? el("button", { type: "button", onclick: () => more(answer) }, `Show ${said}`) : note(`${said} are not in this report.`);
}

// The messages before the answer's first generated turn.
function promptOf(answer) {
  const count = turnsOf(answer);
  const said = (answer.messages ?? []).map((entry, place) => [entry, place]).filter(([entry]) => entry.role === "assistant");
  const first = said.length >= count && count ? said[said.length - count][1] : (answer.messages ?? []).length;
  return (answer.messages ?? []).slice(0, first);
}

function turnsOf(answer) {
  const turns = answer.columns.turns;
  if (turns?.length) return turns.at(-1) + 1;
  const messages = answer.messages ?? [];
  const asked = messages.findIndex((entry) => entry.role === "user");
  return messages.slice(asked + 1).filter((entry) => entry.role === "assistant").length;
}

// The answer's turns and what the environment or tools said between them.
function conversation(answer, group, measure, onPick) {
  const messages = answer.messages ?? [];
  const before = promptOf(answer).length;
  const spans = turnSpans(answer);
  const several = messages.length - before > 1;
  const parts = [];
  let turn = 0;
  for (const entry of messages.slice(before)) {
    if (entry.role !== "assistant") {
      parts.push(message(entry));
      continue;
    }
    const span = spans[turn];
    turn += 1;
    const text = span ? tokenLine(answer, span[0], span[1], measure, group.scales, onPick) : shown(contentOf(entry));
    parts.push(turnBox(entry, text, several));
  }
  for (const span of spans.slice(turn)) parts.push(turnBox({}, tokenLine(answer, span[0], span[1], measure, group.scales, onPick), false));
  if (!parts.length) parts.push(el("div", { className: "text" }, answer.text ? shown(answer.text) : el("span", { className: "faint" }, "empty answer")));
  return el("div", { className: "turns" }, parts);
}

function turnBox(entry, text, several) {
  const calls = entry.tool_calls ?? [];
  return el(
    "div",
    { className: several ? "turn assistant" : "turn" },
    several ? el("div", { className: "role" }, "assistant") : null,
    el("div", { className: "text" }, text),
    calls.length ? el("details", { className: "calls", open: true }, el("summary", {}, plural(calls.length, "tool call")), calls.map(call)) : null,
  );
}

function call(entry) {
  const made = entry.function ?? entry;
  const words = typeof made.arguments === "string" ? made.arguments : JSON.stringify(made.arguments ?? {}, null, 1);
  return el("pre", {}, el("b", {}, shown(made.name ?? "call")), " ", shown(words));
}

export function message(entry) {
  return el(
    "div",
    { className: `turn ${["tool", "user", "system", "assistant"].includes(entry.role) ? entry.role : ""}` },
    el("div", { className: "role" }, shown(entry.role ?? "message"), entry.name ? el("span", { className: "faint" }, " ", shown(entry.name)) : null),
    el("div", { className: "text" }, shown(contentOf(entry))),
    (entry.tool_calls ?? []).map(call),
  );
}

function contentOf(entry) {
  const content = entry.content ?? "";
  return typeof content === "string" ? content : JSON.stringify(content, null, 1);
}

// [first, after the last] token of each turn.
function turnSpans(answer) {
  const turns = answer.columns.turns ?? (answer.columns.tokens ?? answer.columns.pieces ?? []).map(() => 0);
  const spans = [];
  turns.forEach((turn, at) => {
    if (at === 0 || turn !== turns[at - 1]) spans.push([at, at + 1]);
    else spans[spans.length - 1][1] = at + 1;
  });
  return spans;
}
