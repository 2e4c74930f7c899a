// One prompt in every step: the rewards over time, and two answers with their differences.
import { el, note, number, plural, shown } from "./dom.js";
import { rewardText } from "./answers.js";

export class Across {
  constructor(app, run, key, onClose) {
    Object.assign(this, { app, run, key, found: null, ended: false });
    this.body = el("div", {}, el("p", { className: "faint" }, "Searching the steps…"));
    this.root = el(
      "section",
      { className: "across", "aria-label": "This prompt across steps" },
      el("header", {}, el("h3", {}, "This prompt across steps"), el("button", { className: "quiet", type: "button", onclick: onClose, title: "Close (Esc)" }, "Close")),
      this.body,
    );
    this.search();
  }

  async search() {
    do {
      try {
        this.found = await this.app.ask("/api/prompt", { run: this.run, key: this.key });
      } catch (error) {
        this.body.replaceChildren(note(error.message, "error"));
        return;
      }
      if (!this.ended) this.draw();
    } while (!this.ended && this.found.searched < this.found.of);
  }

  end() {
    this.ended = true;
  }

  draw() {
    const { steps, searched, of, logged } = this.found;
    const said = searched < of ? `searched ${searched} of ${plural(of, "step")}` : `in ${steps.length} of ${plural(of, "logged step")}${logged > of ? `, evenly spaced among ${logged.toLocaleString("en")}` : ""}`;
    const answers = steps.flatMap((entry) => entry.answers.map((answer) => ({ step: entry.step, ...answer })));
    if (!answers.length) {
      this.body.replaceChildren(el("p", { className: "faint" }, said));
      return;
    }
    this.one ??= answers[0];
    const last = steps.at(-1);
    this.other = this.chosen ? this.other : { step: last.step, ...last.answers[0] };
    this.body.replaceChildren(
      el("p", { className: "faint" }, said),
      this.strip(steps),
      el("div", { className: "pair" }, this.picker("Before", answers, "one"), this.picker("After", answers, "other")),
      el("div", { className: "pair" }, this.side(this.one, this.other, false), this.side(this.other, this.one, true)),
    );
  }

  strip(steps) {
    const means = steps.map((entry) => mean(entry.answers.map((answer) => answer.reward).filter((reward) => typeof reward === "number")));
    const known = means.filter((value) => value !== null);
    const [low, high] = [Math.min(0, ...known), Math.max(...known, Math.min(0, ...known) + 1e-9)];
    return el(
      "div",
      { className: "strip", role: "list", "aria-label": "mean reward by step" },
      steps.map((entry, place) => {
        const bar = el("span", { className: "column" });
        bar.style.height = `${means[place] === null ? 2 : 4 + (36 * (means[place] - low)) / (high - low)}px`;
        const picked = this.one.step === entry.step || this.other.step === entry.step;
        const pick = () => this.pick("other", { step: entry.step, ...entry.answers[0] });
        return el("button", { type: "button", role: "listitem", className: picked ? "picked" : "", title: `step ${entry.step}: mean reward ${number(means[place])}`, onclick: pick }, bar, el("small", {}, String(entry.step)));
      }),
    );
  }

  pick(side, answer) {
    this[side] = answer;
    this.chosen = true;
    this.draw();
  }

  picker(title, answers, side) {
    const select = el("select", { "aria-label": `${title}: answer` });
    answers.forEach((answer, place) => select.append(el("option", { value: place }, `step ${answer.step}, #${answer.index}: ${rewardText(answer.reward)}`)));
    select.value = answers.findIndex((answer) => answer.step === this[side].step && answer.index === this[side].index && answer.role === this[side].role);
    select.addEventListener("change", () => this.pick(side, answers[Number(select.value)]));
    return el("label", {}, `${title} `, select);
  }

  side(answer, other, added) {
    const parts = difference(added ? other.text : answer.text, added ? answer.text : other.text);
    const kept = parts.filter((part) => part.kind === "same" || part.kind === (added ? "added" : "removed"));
    return el("div", { className: "text diff" }, kept.map((part) => (part.kind === "same" ? shown(part.text) : el(added ? "ins" : "del", {}, shown(part.text)))));
  }
}

function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

// The words of two texts that are the same, removed and added (longest common subsequence).
export function difference(before, after) {
  const split = (text) => {
    const words = text.match(/\s+|[\p{L}\p{N}_]+|./gsu) ?? [];
    return words.length > 1 || text.length > 200 ? words : [...text];
  };
  let [one, other] = [split(before), split(after)];
  const most = 1500; // words; the table below has its square
  const cut = one.length > most || other.length > most;
  const tails = cut ? [one.slice(most).join(""), other.slice(most).join("")] : ["", ""];
  [one, other] = [one.slice(0, most), other.slice(0, most)];
  const width = other.length + 1;
  const table = new Uint16Array((one.length + 1) * width);
  for (let i = one.length - 1; i >= 0; i -= 1) {
    for (let j = other.length - 1; j >= 0; j -= 1) {
      table[i * width + j] = one[i] === other[j] ? table[(i + 1) * width + j + 1] + 1 : Math.max(table[(i + 1) * width + j], table[i * width + j + 1]);
    }
  }
  const parts = [];
  const add = (kind, text) => {
    if (!text) return;
    if (parts.at(-1)?.kind === kind) parts.at(-1).text += text;
    else parts.push({ kind, text });
  };
  let [i, j] = [0, 0];
  while (i < one.length || j < other.length) {
    if (i < one.length && j < other.length && one[i] === other[j]) {
      add("same", one[i]);
      i += 1;
      j += 1;
    } else if (j >= other.length || (i < one.length && table[(i + 1) * width + j] >= table[i * width + j + 1])) add("removed", one[i++]);
    else add("added", other[j++]);
  }
  if (tails[0] === tails[1]) add("same", tails[0]);
  else {
    add("removed", tails[0]);
    add("added", tails[1]);
  }
  return parts;
}
