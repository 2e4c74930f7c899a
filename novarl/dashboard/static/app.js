// The page: the state in its address, the list of runs, live changes, the keyboard.
import { runColor } from "./chart.js";
import { CurvesView } from "./curves.js";
import { atMost, el, note, number, shown } from "./dom.js";
import { alertList, configTable, state } from "./facts.js";
import { SamplesView } from "./samples.js";

const TITLES = { curves: "Curves", samples: "Samples", alerts: "Alerts", config: "Config" };
const MOST = 30;

class App {
  constructor() {
    this.state = {};
    this.runs = [];
    this.order = []; // the runs in the order in which they got a color
    this.views = { curves: new CurvesView(this), samples: new SamplesView(this), alerts: new AlertsView(this), config: new ConfigView(this) };
    this.main = document.getElementById("main");
    this.words = "";
  }

  async start() {
    this.read();
    await this.list();
    this.complete();
    this.show(true);
    addEventListener("hashchange", () => this.navigated());
    addEventListener("keydown", (event) => this.key(event));
    document.getElementById("theme").addEventListener("click", () => this.theme());
    document.getElementById("help").addEventListener("click", () => this.help());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.show(true));
    this.listen();
  }

  async ask(path, words = {}) {
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries(words)) {
      for (const one of Array.isArray(value) ? value : [value]) if (one !== undefined && one !== null) query.append(name, one);
    }
    let answer;
    try {
      answer = await fetch(`${path}?${query}`);
    } catch {
      throw new Error("The server does not answer: novarl watch has ended, or is busy.");
    }
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error ?? `The server answered ${answer.status}.`);
    return found;
  }

  // The runs with curves; the current one is among them.
  selected() {
    return this.state.runs ?? [];
  }

  place(run) {
    if (!this.order.includes(run)) this.order.push(run);
    return this.order.indexOf(run);
  }

  read() {
    const [view, query] = location.hash.replace(/^#\/?/, "").split("?");
    const words = new URLSearchParams(query ?? "");
    const whole = (name) => (/^\d+$/.test(words.get(name) ?? "") ? Number(words.get(name)) : null);
    this.state = { view: TITLES[view] ? view : "curves", run: words.get("run"), runs: words.getAll("runs"), step: whole("step"), group: whole("group"), color: words.get("color") };
  }

  // Fill in what the address does not say.
  complete() {
    const known = this.runs.map((run) => run.name);
    this.state.runs = this.state.runs.filter((run) => known.includes(run));
    if (!known.includes(this.state.run)) this.state.run = this.state.runs[0] ?? this.runs.find((run) => !run.problem)?.name ?? known[0] ?? null;
    if (!this.state.runs.length && this.state.run) this.state.runs = [this.state.run];
    this.state.runs.forEach((run) => this.place(run));
  }

  // Change the state and its address, and draw nothing.
  keep(change) {
    Object.assign(this.state, change);
    history.replaceState(null, "", this.address(this.state));
  }

  address(next) {
    const words = new URLSearchParams();
    if (next.run) words.set("run", next.run);
    if (next.runs.length > 1 || next.runs[0] !== next.run) next.runs.forEach((run) => words.append("runs", run));
    for (const name of ["step", "group", "color"]) if (next[name] !== null && next[name] !== undefined) words.set(name, next[name]);
    return `#/${next.view}?${words}`;
  }

  go(change) {
    const address = this.address({ ...this.state, ...change });
    if (address === location.hash) return;
    history[change.view || change.run ? "pushState" : "replaceState"](null, "", address);
    this.navigated();
  }

  navigated() {
    const before = this.state;
    this.read();
    this.complete();
    if (before.view !== this.state.view) this.show(true);
    else if (this.view().updated) {
      this.drawRuns();
      this.told(this.view().updated(before));
    } else if (before.run !== this.state.run || before.runs.join("|") !== this.state.runs.join("|")) this.show(true);
  }

  view() {
    return this.views[this.state.view];
  }

  show(anew) {
    document.title = `${TITLES[this.state.view]} · NovaRL`;
    const links = Object.entries(TITLES).map(([name, title]) => el("button", { type: "button", "aria-current": name === this.state.view ? "page" : undefined, onclick: () => this.go({ view: name }) }, title));
    document.getElementById("views").replaceChildren(...links);
    this.drawRuns();
    if (!this.runs.length) {
      this.main.replaceChildren(el("div", { className: "empty" }, el("h2", {}, "No runs yet"), el("p", {}, "Watching ", shown((this.places ?? []).join(", ")), ". A run appears here when it starts, for example: ", el("code", {}, "novarl rl task=sort"))));
      return;
    }
    if (this.main.firstChild !== this.view().root) this.main.replaceChildren(this.view().root);
    if (anew) this.told(this.view().open());
  }

  // Says what went wrong where a view was to be drawn.
  told(drawn) {
    Promise.resolve(drawn).catch((error) => this.main.prepend(note(error.message, "error")));
  }

  openStep(step) {
    this.go({ view: "samples", step, group: null });
  }

  async list() {
    try {
      const found = await this.ask("/api/runs");
      Object.assign(this, { runs: found.runs, refused: found.refused, places: found.places });
    } catch (error) {
      this.main.replaceChildren(note(error.message, "error"));
    }
  }

  drawRuns() {
    const box = document.getElementById("runs");
    const sought = this.words.toLowerCase();
    const found = this.runs.filter((run) => run.name.toLowerCase().includes(sought));
    const items = found.map((run) => this.runItem(run));
    const filter = el("input", { type: "search", placeholder: "Find a run", "aria-label": "Find a run", value: this.words });
    filter.addEventListener("input", () => {
      this.words = filter.value;
      this.drawRuns();
      document.querySelector("#runs input[type=search]").focus();
    });
    const open = box.querySelector("details")?.open ?? innerWidth > 900;
    const current = this.state.run ? shown(this.state.run) : "none";
    box.replaceChildren(
      el("details", { open }, el("summary", {}, el("h2", {}, "Runs"), el("span", { className: "faint" }, ` ${this.runs.length}`), el("span", { className: "currentrun" }, current)), this.runs.length > 8 ? filter : null, el("ul", {}, items), (this.refused ?? []).map((text) => note(text))),
    );
  }

  runItem(run) {
    const chosen = this.selected().includes(run.name);
    const check = el("input", { type: "checkbox", checked: chosen, "aria-label": `Curves of ${run.name}` });
    check.addEventListener("change", () => this.toggle(run.name, check.checked));
    const swatch = el("span", { className: "swatch" });
    if (chosen) swatch.style.background = runColor(this.place(run.name));
    const step = run.last.step === undefined ? "" : `${number(run.last.step, 9)}${run.total ? ` / ${number(run.total, 9)}` : ""}`;
    const reward = run.last.reward_mean ?? run.last["eval/score"] ?? run.last.loss;
    const label = run.last.reward_mean !== undefined ? "reward" : run.last["eval/score"] !== undefined ? "score" : "loss";
    return el(
      "li",
      { className: run.name === this.state.run ? "current" : "" },
      el("label", { className: "pick", title: "Show its curves" }, check, swatch),
      el(
        "button",
        { type: "button", className: "run", "aria-current": run.name === this.state.run ? "true" : undefined, onclick: () => this.choose(run.name) },
        el("span", { className: "name" }, shown(run.name)),
        el("span", { className: "line" }, state(run), el("span", { className: "num" }, step)),
        run.problem ? el("span", { className: "problem" }, shown(run.problem)) : null,
        reward === undefined ? null : el("span", { className: "line faint" }, el("span", {}, `${label} ${number(reward, 3)}`), run.alerts ? el("span", { className: "warn" }, `▲ ${run.alerts}`) : null),
      ),
    );
  }

  choose(name) {
    const alone = this.selected().length <= 1;
    const runs = alone ? [name] : [...new Set([...this.selected(), name])];
    this.go({ run: name, runs, ...(name === this.state.run ? {} : { group: null, step: this.state.view === "samples" ? this.state.step : null }) });
  }

  toggle(name, on) {
    const runs = on ? [...this.selected(), name].slice(-MOST) : this.selected().filter((run) => run !== name);
    if (!runs.length) return this.drawRuns();
    return this.go({ runs, run: runs.includes(this.state.run) ? this.state.run : runs[0] });
  }

  listen() {
    const source = new EventSource("/api/events");
    const live = document.getElementById("live");
    const relist = atMost(async () => {
      const had = this.runs.length;
      await this.list();
      this.complete();
      if (had) this.drawRuns();
      else this.show(true);
    }, 150);
    source.addEventListener("open", () => {
      live.className = "live on";
      live.textContent = "live";
    });
    source.addEventListener("error", () => {
      live.className = "live off";
      live.textContent = "no server";
    });
    source.addEventListener("message", (event) => {
      const { runs } = JSON.parse(event.data);
      relist();
      Promise.resolve(this.view().changed?.(runs)).catch(() => {}); // the next change asks again; `live` shows a lost server
    });
  }

  theme() {
    const next = { undefined: "light", light: "dark" }[document.documentElement.dataset.theme];
    if (next) document.documentElement.dataset.theme = next;
    else delete document.documentElement.dataset.theme;
    localStorage.setItem("theme", next ?? "");
    this.show(true);
  }

  help() {
    const keys = [["j  k  or  ↓  ↑", "next and previous group"], ["←  →", "earlier and later step"], ["c  C", "color by the next or previous measure"], ["n  N", "next or previous step with a match"], ["p", "this prompt across steps"], ["/", "search"], ["1 2 3 4", "curves, samples, alerts, configuration"], ["Enter  ←  →", "on a token: its values, the tokens beside it"], ["Esc", "close, leave the search"], ["?", "this list"]];
    const dialog = document.getElementById("keys");
    dialog.replaceChildren(el("h2", {}, "Keyboard"), el("dl", {}, keys.map(([key, meaning]) => el("div", {}, el("dt", {}, key.split("  ").map((one) => (one === "or" ? " or " : el("kbd", {}, one)))), el("dd", {}, meaning)))), el("form", { method: "dialog" }, el("button", {}, "Close")));
    if (!dialog.open) dialog.showModal();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById("keys").open) return;
    const typing = event.target.matches("input:not([type=checkbox]):not([type=range]), select, textarea");
    if (typing) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const view = Object.keys(TITLES)["1234".indexOf(event.key)];
    if (event.key === "?") this.help();
    else if (event.key === "/") this.view().search?.();
    else if (view) this.go({ view });
    else if (event.target.type === "range" || !this.view().key?.(event)) return;
    event.preventDefault();
  }
}

class AlertsView {
  constructor(app) {
    this.app = app;
    this.root = el("div", { className: "alertsview" });
  }

  async open() {
    try {
      const found = await this.app.ask("/api/alerts", { run: this.app.selected() });
      this.root.replaceChildren(el("h2", {}, "Alerts and findings"), alertList(found, (alert) => this.app.go({ view: "samples", run: alert.run, step: alert.step, group: null })));
    } catch (error) {
      this.root.replaceChildren(note(error.message, "error"));
    }
  }

  changed(runs) {
    if (runs.some((run) => this.app.selected().includes(run))) this.open();
  }
}

class ConfigView {
  constructor(app) {
    this.app = app;
    this.found = null;
    this.filter = el("input", { type: "search", placeholder: "Find a key or value  ( / )", "aria-label": "Find a key or value" });
    this.differing = el("input", { type: "checkbox" });
    this.body = el("div", {});
    this.filter.addEventListener("input", () => this.draw());
    this.differing.addEventListener("change", () => this.draw());
    this.root = el("div", { className: "configview" }, el("h2", {}, "Configuration"), el("div", { className: "tools" }, this.filter, el("label", { className: "check" }, this.differing, "only what differs")), this.body);
  }

  search() {
    this.filter.focus();
  }

  async open() {
    try {
      this.found = await this.app.ask("/api/config", { run: this.app.selected() });
      this.differing.checked = this.found.runs.length > 1;
      this.draw();
    } catch (error) {
      this.body.replaceChildren(note(error.message, "error"));
    }
  }

  draw() {
    if (this.found) this.body.replaceChildren(configTable(this.found, this.differing.checked, this.filter.value));
  }
}

const theme = localStorage.getItem("theme");
if (theme) document.documentElement.dataset.theme = theme;
new App().start();
