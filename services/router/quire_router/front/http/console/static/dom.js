// Elements, keyed lists and figures. Text enters the page only as text nodes, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** Make an element. `props`: class, text, on (listeners), attributes by name. Children are nodes or strings. */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** Make an element of SVG. */
export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (name === "class") element.setAttribute("class", value);
    else if (name === "text") element.textContent = value;
    else if (name === "on") for (const [event, heard] of Object.entries(value)) element.addEventListener(event, heard);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set text only where it has changed, so that a reader's selection and focus stay. */
export function setText(element, text) {
  const value = String(text);
  if (element.textContent !== value) element.textContent = value;
}

export function show(element, visible) {
  if (element.hidden === visible) element.hidden = !visible;
}

/** A list whose items keep their elements by key. `make(item)` returns {element, update}. */
export class KeyedList {
  #parts = new Map();

  constructor(parent, make, empty = "") {
    this.parent = parent;
    this.make = make;
    this.empty = empty ? h("p", { class: "empty", text: empty }) : null;
  }

  update(items, keyOf) {
    const wanted = new Map(items.map((item) => [keyOf(item), item]));
    for (const [key, part] of this.#parts) {
      if (!wanted.has(key)) {
        part.element.remove();
        this.#parts.delete(key);
      }
    }
    if (this.empty) {
      if (wanted.size) this.empty.remove();
      else if (!this.empty.isConnected) this.parent.append(this.empty);
    }
    let before = this.parent.firstElementChild;
    for (const [key, item] of wanted) {
      let part = this.#parts.get(key);
      if (!part) {
        part = this.make(item);
        this.#parts.set(key, part);
      }
      if (part.element !== before) this.parent.insertBefore(part.element, before);
      else before = before.nextElementSibling;
      part.update(item);
    }
  }
}

/** A bar of parts: [{class, share, title}], shares of 1. */
export class Bar {
  constructor(label) {
    this.element = h("div", { class: "bar", role: "img", "aria-label": label });
    this.label = label;
  }

  update(parts, text) {
    while (this.element.children.length < parts.length) this.element.append(h("i"));
    parts.forEach((part, index) => {
      const piece = this.element.children[index];
      piece.className = part.class;
      piece.style.width = `${Math.max(0, Math.min(1, part.share || 0)) * 100}%`;
    });
    this.element.setAttribute("aria-label", `${this.label}: ${text}`);
    this.element.title = text;
  }
}

/** The last values of a figure as a line. */
export class Sparkline {
  #values = [];

  constructor(points = 60) {
    this.points = points;
    this.line = svg("path", { class: "spark-line" });
    this.area = svg("path", { class: "spark-area" });
    this.element = svg("svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" }, this.area, this.line);
  }

  add(value) {
    this.#values = [...this.#values, value].slice(-this.points);
    const most = Math.max(1e-9, ...this.#values);
    const step = 100 / (this.points - 1);
    const start = 100 - (this.#values.length - 1) * step;
    const at = this.#values.map((one, i) => `${(start + i * step).toFixed(1)} ${(22.5 - (one / most) * 20).toFixed(1)}`);
    this.line.setAttribute("d", at.length > 1 ? `M${at.join("L")}` : "");
    this.area.setAttribute("d", at.length > 1 ? `M${start.toFixed(1)} 24L${at.join("L")}L100 24Z` : "");
  }
}

/** A figure with a name, and a line of its last values where wanted. */
export class Figure {
  constructor(name, { spark = false } = {}) {
    this.value = h("dd", {}, "–");
    this.note = h("span", { class: "note" });
    this.spark = spark ? new Sparkline() : null;
    this.element = h("dl", { class: "figure" }, h("dt", { text: name }), this.value, this.note, this.spark?.element);
  }

  update(value, note = "", plotted = null) {
    setText(this.value, value);
    setText(this.note, note);
    if (this.spark && plotted !== null) this.spark.add(plotted);
  }
}

export function number(value, digits = 0) {
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

/** Few significant digits: 0.42, 7.5, 132, 1.2k, 3.4M. */
export function brief(value) {
  if (value >= 1e6) return `${number(value / 1e6, 1)}M`;
  if (value >= 1e4) return `${number(value / 1e3, 1)}k`;
  if (value >= 100 || Number.isInteger(value)) return number(value);
  return value >= 10 ? number(value, 1) : number(value, 2);
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${number(value, unit && value < 100 ? 1 : 0)} ${units[unit]}`;
}

export function duration(ms) {
  if (ms < 10) return `${number(ms, 1)} ms`;
  if (ms < 1000) return `${number(ms)} ms`;
  const s = ms / 1000;
  if (s < 60) return `${number(s, 1)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export function percent(part, whole) {
  return whole ? `${number((100 * part) / whole, part && part < whole / 10 ? 1 : 0)}%` : "–";
}

export function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}
