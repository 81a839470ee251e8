// Elements, numbers and text. Everything from a run reaches the page through textContent: it is data, never markup.

const DATA = JSON.parse(document.getElementById("data").textContent);

/** An element with attributes (a function is a listener) and children (strings become text). */
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (name === "class") node.className = value;
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

const byId = (id) => document.getElementById(id);

/** A number with four significant digits, with a sign in front of positive ones if there is one; a dash for none. */
function num(value, digits = 4, sign = "") {
  if (value == null || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  let text;
  if (Number.isInteger(value) && size < 1e6) text = String(value);
  else if (size >= 1e5 || size < 1e-3) text = value.toExponential(Math.max(0, digits - 2)).replace("e+", "e");
  else text = String(Number(value.toPrecision(digits)));
  return (value > 0 ? sign : "") + text.replaceAll("-", "−");
}

const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

const CONTROL =
  /([\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb])/;

/** Text as nodes, with control characters as their names: they must not act on the page. */
function visible(text) {
  return text.split(CONTROL).filter(Boolean).map((part) => {
    if (part.length > 1 || !CONTROL.test(part)) return part;
    const code = part.codePointAt(0), name = `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
    return el("bdi", { class: "control" }, code < 0x20 ? String.fromCharCode(0x2400 + code) : name);
  });
}

/** An option list with one entry per [value, label]. */
function fill(select, entries, chosen) {
  select.replaceChildren(...entries.map(([value, label]) => el("option", { value, selected: value === chosen }, label)));
}
