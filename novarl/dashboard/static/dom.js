// Elements, numbers and text. All text of a run becomes text nodes here; nothing in these files writes markup.

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]/u;
const RUNS = new RegExp(`(${HIDDEN.source})`, "u");

// An element. `properties` are properties (`className`), or attributes (`aria-…`, `data-…`, `role`), or listeners (`onclick`).
export function el(tag, properties, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.includes("-") || name === "role" || name === "for" || name === "list") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// Text of a run, with control characters and direction marks as visible codes.
export function shown(text) {
  const whole = String(text ?? "");
  if (!HIDDEN.test(whole)) return document.createTextNode(whole);
  const parts = document.createDocumentFragment();
  for (const part of whole.split(RUNS)) {
    if (!part) continue;
    if (part.length <= 2 && HIDDEN.test(part)) {
      const code = part.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
      parts.append(el("span", { className: "code", title: "a character that is invisible or changes the order of text" }, `U+${code}`));
    } else parts.append(part);
  }
  return parts;
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en").replace("-", "−");
  if (size < 1e-3 || size >= 1e6) return value.toExponential(digits - 2).replace("e+", "e").replace(/-/g, "−");
  return String(Number(value.toPrecision(digits))).replace("-", "−");
}

export function seconds(value) {
  if (value >= 3600) return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
  if (value >= 60) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return value >= 1 ? `${number(value, 3)} s` : `${number(value * 1000, 3)} ms`;
}

export function plural(count, word, several = `${word}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? word : several}`;
}

// `call`, once, after calls have stopped for a while.
export function settled(call, milliseconds) {
  let timer = 0;
  return (...words) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...words), milliseconds);
  };
}

// `call`, at most once in a while, and after the last time it was asked for.
export function atMost(call, milliseconds) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    setTimeout(() => {
      waiting = false;
      call();
    }, milliseconds);
  };
}

export function note(text, kind = "note") {
  return el("p", { className: kind, role: kind === "error" ? "alert" : undefined }, shown(text));
}
