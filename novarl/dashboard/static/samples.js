// The sample browser: steps, groups of a step, the answers of a group side by side.
import { Across } from "./across.js";
import { groupView } from "./answers.js";
import { el, note, number, plural, settled, shown } from "./dom.js";
import { inspector, legend, measureNamed, MEASURES } from "./tokens.js";

const FIELDS = ["q", "reward_min", "reward_max", "length_min", "length_max", "finish", "status"];
const PER_PAGE = 40;

export class SamplesView {
  constructor(app) {
    this.app = app;
    this.steps = [];
    this.filters = {};
    this.page = 0;
    this.pages = 1;
    this.groups = [];
    this.asked = 0; // counts requests for a step, so that a late answer to an earlier one is not shown
    this.groupAsked = 0; // the same for groups
    this.loading = false;
    this.pending = 0; // groups to move by once the step is there, for keys pressed meanwhile
    this.build();
  }

  build() {
    this.slider = el("input", { type: "range", min: 0, value: 0, "aria-label": "Step" });
    this.slider.addEventListener("input", settled(() => this.app.go({ step: this.steps[Number(this.slider.value)], group: null }), 60));
    this.at = el("output", { className: "at" });
    const filter = settled(() => this.filtered(), 250);
    const input = (name, title, type = "number") => {
      const box = el("input", { type, name, placeholder: title, "aria-label": title, step: "any" });
      box.addEventListener("input", filter);
      return box;
    };
    const select = (name, title) => {
      const box = el("select", { name, "aria-label": title }, el("option", { value: "" }, title));
      box.addEventListener("change", () => this.filtered());
      return box;
    };
    this.inputs = {
      q: input("q", "Search prompts and answers  ( / )", "search"),
      reward_min: input("reward_min", "reward ≥"),
      reward_max: input("reward_max", "reward ≤"),
      length_min: input("length_min", "length ≥"),
      length_max: input("length_max", "length ≤"),
      finish: select("finish", "any finish reason"),
      status: select("status", "any status"),
    };
    const { q, ...fields } = this.inputs;
    const others = Object.values(fields);
    others.forEach((box) => box.classList.add("more"));
    // Narrow pages show the other filters on demand.
    this.toggle = el("button", { type: "button", className: "toggle", "aria-expanded": "false", onclick: () => this.toggle.setAttribute("aria-expanded", this.filterBox.classList.toggle("opened")) }, "Filters");
    const find = (backwards, text, title) => el("button", { type: "button", title, onclick: () => this.find(backwards) }, text);
    this.matching = el("span", { className: "faint", role: "status" });
    this.color = el("select", { "aria-label": "Color tokens by", title: "Color tokens by (c)" }, MEASURES.map((measure) => el("option", { value: measure.name }, measure.title)));
    this.color.addEventListener("change", () => this.app.go({ color: this.color.value }));
    this.legend = el("span", {});
    this.list = el("ol", { className: "grouplist" });
    this.pager = el("div", { className: "pager" });
    this.only = el("input", { type: "checkbox" });
    this.only.addEventListener("change", () => this.drawGroup());
    this.main = el("div", { className: "samplemain" });
    this.sheet = el("div", { className: "sheet" });
    this.title = el("h2", {});
    this.listBox = el("details", { className: "groupbox", open: innerWidth > 700 }, el("summary", {}, "Groups"), this.list, this.pager);
    this.root = el(
      "div",
      { className: "samples" },
      el("div", { className: "tools steps" }, this.title, el("button", { type: "button", title: "Earlier step (←)", "aria-label": "Earlier step", onclick: () => this.move(-1) }, "‹"), this.at, el("button", { type: "button", title: "Later step (→)", "aria-label": "Later step", onclick: () => this.move(1) }, "›"), this.slider),
      (this.filterBox = el("div", { className: "tools filters" }, q, this.toggle, others, el("span", { className: "pairbuttons" }, find(true, "‹ match", "The step before with a match (N)"), find(false, "match ›", "The next step with a match (n)")), el("label", { className: "check" }, this.only, "matching answers only"), this.matching)),
      el("div", { className: "tools" }, el("label", {}, "Color ", this.color), this.legend),
      el("div", { className: "browser" }, this.listBox, this.main),
      this.sheet,
    );
  }

  search() {
    this.inputs.q.focus();
  }

  query() {
    return Object.fromEntries(FIELDS.filter((name) => this.filters[name]).map((name) => [name, this.filters[name]]));
  }

  async open() {
    const { run } = this.app.state;
    this.title.replaceChildren(shown(run ?? ""));
    if (!run) return this.say("No run.");
    const asked = ++this.asked;
    this.loading = true;
    try {
      const { steps } = await this.app.ask("/api/steps", { run });
      if (asked !== this.asked) return undefined;
      this.steps = expanded(steps);
    } catch (error) {
      return this.say(error.message, "error");
    }
    if (!this.steps.length) return this.say("This run has no rollouts: it logged none (log.rollouts_every), or is not a run of kind rl.");
    this.step = this.closest(this.app.state.step ?? this.steps.at(-1));
    this.slider.max = this.steps.length - 1;
    this.slider.value = this.steps.indexOf(this.step);
    this.at.replaceChildren("step ", el("b", {}, number(this.step, 9)), el("span", { className: "faint" }, ` of ${number(this.steps.at(-1), 9)}`));
    this.color.value = measureNamed(this.app.state.color).name;
    return this.load(asked);
  }

  async load(asked) {
    const { run } = this.app.state;
    let found;
    try {
      found = await this.app.ask("/api/groups", { run, step: this.step, page: this.page, per: PER_PAGE, ...this.query() });
    } catch (error) {
      return this.say(error.message, "error");
    }
    if (asked !== this.asked) return undefined;
    Object.assign(this, { groups: found.groups, pages: found.pages, loading: false });
    this.options("finish", "any finish reason", found.finish_reasons);
    this.options("status", "any status", found.statuses);
    const filtered = Object.keys(this.query()).length > 0;
    this.matching.textContent = filtered ? `${plural(found.groups_found, "group")} of ${found.groups_total} match` : `${plural(found.groups_total, "group")}, ${plural(found.answers, "answer")}`;
    this.drawList(found);
    const wanted = this.app.state.group;
    const first = Math.max(0, this.groups.findIndex((entry) => entry.group === wanted));
    const group = this.groups[Math.min(this.groups.length - 1, Math.max(0, first + this.pending))];
    if (this.pending && group) this.app.keep({ group: group.group });
    this.pending = 0;
    if (!group) {
      this.shownGroup = null;
      this.main.replaceChildren(el("p", { className: "faint empty" }, "No group of this step matches. “match ›” looks in later steps."));
      return undefined;
    }
    return this.openGroup(group.group);
  }

  async openGroup(number_, tokens = undefined) {
    const asked = ++this.groupAsked;
    try {
      const found = await this.app.ask("/api/group", { run: this.app.state.run, step: this.step, group: number_, tokens, ...this.query() });
      if (asked !== this.groupAsked) return;
      this.shownGroup = found;
      this.drawGroup();
    } catch (error) {
      this.main.replaceChildren(note(error.message, "error"));
    }
    for (const item of this.list.children) {
      const current = Number(item.dataset.group) === number_;
      item.classList.toggle("current", current);
      item.firstChild.setAttribute("aria-current", current ? "true" : "false");
      if (current && this.list.scrollHeight > this.list.clientHeight) item.scrollIntoView({ block: "nearest" });
    }
  }

  drawGroup() {
    const group = this.shownGroup;
    if (!group) return;
    const measure = measureNamed(this.app.state.color);
    const recorded = group.answers.some((answer) => Object.keys(answer.columns).length);
    this.legend.replaceChildren(recorded ? legend(measure, group.scales) : el("span", { className: "faint" }, "no tokens recorded"));
    const across = el("button", { type: "button", title: "The same prompt in other steps (p)", onclick: () => this.openAcross() }, "This prompt across steps");
    const body = groupView(group, measure, {
      onPick: (answer, at) => this.inspect(answer, at),
      more: (answer) => this.openGroup(group.group, answer.length),
      only: this.only.checked && Object.keys(this.query()).length > 0,
    });
    this.main.replaceChildren(el("div", { className: "tools groupbar" }, el("span", {}, `Group ${group.group}`, el("span", { className: "faint" }, `, ${plural(group.answers.length, "answer")}`)), across), ...(this.across ? [this.across.root] : []), body);
  }

  drawList(found) {
    const items = found.groups.map((entry) => {
      const dots = entry.answers.map((answer) => el("i", { className: `dot ${answer.status === "failed" ? "failed" : ""} ${answer.matches ? "" : "off"}`, title: `#${answer.index}: ${number(answer.reward)}` }, mark(answer, entry)));
      const button = el("button", { type: "button", onclick: () => this.app.go({ group: entry.group }) }, el("span", { className: "ask" }, shown(entry.prompt)), el("span", { className: "line" }, el("span", { className: "dots" }, dots), el("span", { className: "num" }, entry.mean === null ? "–" : number(entry.mean, 3))));
      const item = el("li", {}, button);
      item.dataset.group = entry.group;
      return item;
    });
    this.list.replaceChildren(...items);
    const turn = (by, text, title) => el("button", { type: "button", disabled: this.page + by < 0 || this.page + by >= this.pages, title, onclick: () => this.turn(by) }, text);
    this.pager.replaceChildren(...(this.pages > 1 ? [turn(-1, "‹", "Groups before"), `${this.page + 1} of ${this.pages}`, turn(1, "›", "More groups")] : []));
  }

  turn(by) {
    this.page += by;
    this.app.state.group = null;
    this.load(++this.asked);
  }

  options(name, title, values) {
    const box = this.inputs[name];
    const chosen = this.filters[name] ?? "";
    const known = chosen && !values.includes(chosen) ? [...values, chosen] : values;
    box.replaceChildren(el("option", { value: "" }, title), ...known.map((value) => el("option", { value }, shown(value))));
    box.value = chosen;
  }

  filtered() {
    this.filters = Object.fromEntries(FIELDS.map((name) => [name, this.inputs[name].value.trim()]));
    this.page = 0;
    this.load(++this.asked);
  }

  // The next step with a match, however far; the server reads for a second at a time.
  async find(backwards) {
    const asked = ++this.asked;
    let after = this.step;
    while (asked === this.asked) {
      let found;
      try {
        found = await this.app.ask("/api/find", { run: this.app.state.run, after, backwards: backwards ? 1 : 0, ...this.query() });
      } catch (error) {
        this.matching.textContent = error.message;
        return;
      }
      if (asked !== this.asked) return;
      if (found.step !== null) {
        this.page = 0;
        this.app.go({ step: found.step, group: null });
        return;
      }
      if (found.searched_to === null) {
        this.matching.textContent = `no ${backwards ? "earlier" : "later"} step has a match`;
        return;
      }
      after = found.searched_to;
      this.matching.textContent = `searched to step ${after}…`;
    }
  }

  inspect(answer, at) {
    const close = () => this.closeSheet();
    this.sheet.replaceChildren(inspector(answer, at, close));
  }

  closeSheet() {
    this.sheet.replaceChildren();
    document.querySelectorAll(".t.picked").forEach((token) => token.classList.remove("picked"));
  }

  openAcross() {
    this.across?.end();
    const close = () => {
      this.across?.end();
      this.across = null;
      this.drawGroup();
    };
    this.across = new Across(this.app, this.app.state.run, this.shownGroup.key, close);
    this.drawGroup();
  }

  closest(step) {
    return this.steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best), this.steps[0]);
  }

  move(by) {
    const next = this.steps[this.steps.indexOf(this.step) + by];
    if (next !== undefined) this.app.go({ step: next });
  }

  moveGroup(by) {
    if (this.loading) {
      this.pending += by;
      return;
    }
    const current = this.app.state.group ?? this.shownGroup?.group ?? this.groups[0]?.group;
    const place = this.groups.findIndex((entry) => entry.group === current) + by;
    if (this.groups[place]) this.app.go({ group: this.groups[place].group });
    else if (place < 0 && this.page > 0) this.turn(-1);
    else if (place >= this.groups.length && this.page + 1 < this.pages) this.turn(1);
  }

  // The state of the page changed, by a key, a link or the back button.
  updated(before) {
    const { run, step, group, color } = this.app.state;
    if (run !== before.run || step !== before.step) {
      if (run !== before.run) this.page = 0;
      if (run !== before.run && this.across) {
        this.across.end();
        this.across = null;
      }
      this.closeSheet();
      return this.open();
    }
    if (group !== before.group && group !== null) {
      this.across?.end();
      this.across = null;
      this.closeSheet();
      return this.openGroup(group);
    }
    if (color !== before.color) {
      this.color.value = measureNamed(color).name;
      this.drawGroup();
    }
    return undefined;
  }

  async changed(runs) {
    const { run } = this.app.state;
    if (!runs.includes(run)) return;
    const last = this.steps.at(-1);
    const { steps } = await this.app.ask("/api/steps", { run }).catch(() => ({ steps: [] }));
    const now = expanded(steps);
    if (now.at(-1) === last && now.length === this.steps.length) return;
    if (!this.steps.length) return this.open();
    this.steps = now;
    this.slider.max = Math.max(0, now.length - 1);
    this.slider.value = now.indexOf(this.step);
    this.at.replaceChildren("step ", el("b", {}, number(this.step, 9)), el("span", { className: "faint" }, ` of ${number(now.at(-1), 9)}`));
  }

  say(text, kind = "faint empty") {
    Object.assign(this, { groups: [], loading: false, pending: 0 });
    this.list.replaceChildren();
    this.pager.replaceChildren();
    this.at.replaceChildren();
    this.legend.replaceChildren();
    this.matching.textContent = "";
    this.shownGroup = null;
    this.main.replaceChildren(note(text, kind));
  }

  key(event) {
    const by = { ArrowLeft: [-1, 0], h: [-1, 0], ArrowRight: [1, 0], l: [1, 0], j: [0, 1], ArrowDown: [0, 1], k: [0, -1], ArrowUp: [0, -1] }[event.key];
    if (by) {
      if (by[0]) this.move(by[0]);
      else this.moveGroup(by[1]);
    } else if (event.key === "c" || event.key === "C") {
      const place = MEASURES.findIndex((measure) => measure.name === this.color.value);
      const by_ = event.key === "c" ? 1 : MEASURES.length - 1;
      this.app.go({ color: MEASURES[(place + by_) % MEASURES.length].name });
    } else if (event.key === "n") this.find(false);
    else if (event.key === "N") this.find(true);
    else if (event.key === "p" && this.shownGroup) this.openAcross();
    else if (event.key === "Escape" && this.sheet.firstChild) this.closeSheet();
    else if (event.key === "Escape" && this.across) {
      this.across.end();
      this.across = null;
      this.drawGroup();
    } else return false;
    return true;
  }
}

// A mark in the list of groups: an answer's reward within its group, as a shape and a color.
function mark(answer, entry) {
  if (answer.status === "failed") return "✕";
  if (answer.reward === null) return "–";
  const rewards = entry.answers.map((other) => other.reward).filter((reward) => reward !== null);
  const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
  if (high === low) return high > 0 ? "●" : "○";
  return "○◔◑◕●"[Math.round((4 * (answer.reward - low)) / (high - low))];
}

// The inverse of the server's `ranges`.
export function expanded(ranges) {
  return ranges.flatMap(([first, last, by]) => Array.from({ length: Math.floor((last - first) / by) + 1 }, (_, place) => first + place * by));
}
