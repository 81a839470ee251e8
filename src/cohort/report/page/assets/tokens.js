// Tokens: unpack a group, spell its tokens, colour them by a quantity, and show the numbers under the pointer.

const unpacked = new Map();

/** A group of completions with the arrays of its tokens; inflated when it is first looked at. */
function group(index) {
  if (!unpacked.has(index)) unpacked.set(index, unpack(byId(`group-${index}`).textContent));
  return unpacked.get(index);
}

async function unpack(text) {
  const packed = Uint8Array.from(atob(text.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  let at = 4 + new DataView(bytes.buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, at)));
  header.arrays = Object.fromEntries(header.arrays.map(([name, kind, count]) => {
    const size = kind === "u1" ? 1 : 4, planes = bytes.subarray(at, at += size * count);
    return [name, kind === "u1" ? planes : new (kind === "f4" ? Float32Array : Int32Array)(merged(planes, count).buffer)];
  }));
  const { ids, pieces, special } = header.vocabulary || { ids: [], pieces: [], special: [] };
  header.pieces = new Map(ids.map((id, place) => [id, pieces[place]]));
  header.special = new Set(special);
  let next = 0;  // the place of each token among the drawn tokens of the group; -1: the policy did not draw it
  header.place = Int32Array.from(header.arrays.ids, (_, i) => (header.arrays.drawn?.[i] === 0 ? -1 : next++));
  header.count = next;
  return header;
}

/** Numbers whose bytes are stored plane by plane, lowest first, because that deflates better. */
function merged(planes, count) {
  const bytes = new Uint8Array(4 * count);
  for (let i = 0; i < 4 * count; i++) bytes[4 * (i % count) + Math.floor(i / count)] = planes[i];
  return bytes;
}

/** The text of a token, or its bytes if they are only a part of a character. */
const spelled = (header, id) => header.pieces.get(id) ?? (header.vocabulary ? `⟨${id}⟩` : `${id} `);
const hexOf = (bytes) => bytes.map((byte) => `⟨${byte.toString(16).toUpperCase().padStart(2, "0")}⟩`).join("");

/** The tokens of a completion as pieces of text. Several tokens that make one character are one piece. */
function piecesOf(header, { t: [from, to] }) {
  const pieces = [], decoder = new TextDecoder("utf-8", { fatal: true });
  for (let first = from, count; first < to; first += count) {
    let text = spelled(header, header.arrays.ids[first]), bytes = [];
    count = 1;
    if (typeof text !== "string") {
      const alone = hexOf(text);
      for (let i = first; ; i++) {
        const more = i < to && bytes.length < 8 ? spelled(header, header.arrays.ids[i]) : "";
        if (typeof more === "string") { text = alone; break; }
        bytes = [...bytes, ...more];
        try { [text, count] = [decoder.decode(new Uint8Array(bytes)), i - first + 1]; break; } catch { /* not yet a character */ }
      }
    }
    pieces.push({ text, first, count });
  }
  return pieces;
}

/** Quantities that follow from others. k3 is the non-negative estimator of KL(policy || reference). */
const DERIVED = {
  kl: { from: ["logps", "ref_logps"], value: (a, n) => { const d = a.ref_logps[n] - a.logps[n]; return Math.exp(d) - 1 - d; } },
  gap: { from: ["logps", "sampler_logps"], value: (a, n) => (a.old_logps || a.logps)[n] - (a.full_logps || a.sampler_logps)[n] },
  coefficient: { from: ["policy_coefficient"], value: (a, n) => a.policy_coefficient[n] + (a.kl_coefficient?.[n] || 0) },
};

const hasQuantity = (header, key) => (DERIVED[key]?.from || [key]).every((name) => header.arrays[name]);
const quantity = ({ arrays }, key, n) => (DERIVED[key] ? DERIVED[key].value(arrays, n) : arrays[key][n]);

/** How values are coloured: levels -6..6 on the scale of a quantity over the group, and the ends of the scale. */
function scaleOf(header, chosen) {
  if (!chosen) return { level: () => 0, ends: null };
  const { key, scale } = chosen, placed = (value) => (scale === "ratio" ? Math.log(Math.max(value, 1e-9)) : value);
  const values = Array.from({ length: header.count }, (_, n) => quantity(header, key, n)).filter(Number.isFinite);
  const sizes = values.map((value) => Math.abs(placed(value))).sort((a, b) => a - b);
  const reach = sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes.at(-1) || 0;
  const level = (value) => {
    if (!Number.isFinite(value) || !reach) return 0;
    const distance = placed(value) / reach, size = Math.abs(distance);
    const share = scale === "positive" || scale === "negative" ? Math.sqrt(size) : size;  // most are near 0
    return Math.sign(distance) * Math.min(6, Math.ceil(share * 6 - 0.5));
  };
  const low = scale === "positive" ? 0 : -reach, high = scale === "negative" ? 0 : reach;
  return { level, ends: sizes.length ? (scale === "ratio" ? [Math.exp(low), Math.exp(high)] : [low, high]) : null };
}

const shade = (level) => (level ? ` ${level < 0 ? "n" : "p"}${Math.abs(level)}` : "");

/** The element of a piece. */
function tokenElement(header, { first, count, text }, key, scale) {
  const n = header.place[first];
  const kind = n < 0 ? " given" : key && shade(scale.level(quantity(header, key, n)));
  const marks = (header.special.has(header.arrays.ids[first]) ? " special" : "") + (count > 1 ? " joined" : "");
  const parts = text.split(/(\n)/).flatMap((part) => (part === "\n" ? [el("span", { class: "end" }, "↵"), "\n"] : visible(part)));
  return el("span", { class: `t${kind}${marks}`, "data-i": first, "data-count": count }, ...parts);
}

/** Render tokens into a box, `size` at a time; more when the reader comes to the end. */
function renderTokens(box, header, completion, key, scale, size) {
  const pieces = piecesOf(header, completion), turns = new Map(completion.turns), [start] = completion.t;
  const more = el("button", { type: "button", click: () => append() }), line = (text) => el("span", { class: "turn" }, text);
  let next = 0;
  const append = () => {
    const nodes = pieces.slice(next, next += size).flatMap((piece) => {
      const place = piece.first - start, gap = completion.gap?.[0] === place;
      return [gap && line(`${plural(completion.gap[1], "token")} left out of this page`),
        turns.has(place) && line(turns.get(place)), tokenElement(header, piece, key, scale)].filter(Boolean);
    });
    more.before(...nodes);
    more.hidden = next >= pieces.length;
    more.textContent = `Show more of ${plural(completion.tokens, "token")}`;
  };
  box.replaceChildren(more);
  append();
  box.onscroll = () => { if (!more.hidden && box.scrollTop + box.clientHeight > box.scrollHeight - 300) append(); };
}

// The pointer ------------------------------------------------------------------------------------------------------

/** Show the numbers of a token beside it. */
function showPointer(header, completion, node) {
  const box = byId("pointer"), first = Number(node.dataset.i), count = Number(node.dataset.count);
  box.replaceChildren(...Array.from({ length: count }, (_, i) => describeToken(header, completion, first + i, count > 1)).flat());
  box.hidden = false;
  const at = node.getClientRects()[0] || node.getBoundingClientRect(), gap = 8;
  const below = at.bottom + gap + box.offsetHeight < innerHeight;
  box.style.left = `${Math.max(4, Math.min(at.left, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${Math.max(4, below ? at.bottom + gap : at.top - box.offsetHeight - gap)}px`;
}

function describeToken(header, completion, token, partial) {
  const n = header.place[token], id = header.arrays.ids[token], piece = header.pieces.get(id) ?? (header.vocabulary ? `⟨${id}⟩` : []);
  const place = token - completion.t[0], skipped = completion.gap && place >= completion.gap[0] ? completion.gap[1] : 0;
  const text = typeof piece === "string" ? JSON.stringify(piece) : hexOf(piece);
  const where = ` id ${id}, token ${place + skipped + 1} of ${completion.tokens}`;
  const found = [el("div", {}, el("span", { class: "token" }, ...visible(text)), where)];
  if (partial) found.push(el("div", { class: "soft" }, "part of a character"));
  if (n < 0) return [...found, el("div", { class: "soft" }, "Given to the policy, not drawn: it is read and has no gradient.")];
  const rows = DATA.quantities.filter(({ key }) => hasQuantity(header, key))
    .map(({ key, label }) => [label, quantity(header, key, n)]).filter(([, value]) => !Number.isNaN(value));
  const cells = rows.map(([label, value]) => el("tr", {}, el("th", {}, label), el("td", { class: "number" }, num(value, 5))));
  return [...found, el("table", {}, ...cells), el("div", {}, causeOf(header, completion, n))];
}

/** Why a drawn token has no policy gradient, in words; empty if it has one or nobody knows. */
function causeOf(header, completion, n) {
  const { no_gradient: codes, advantage } = header.arrays, name = header.causes[codes?.[n]];
  if (name === "held") return "It has a gradient; its log-ratio was clamped to 20.";
  if (name !== undefined) return `No gradient: ${DATA.causes[name] || name}.`;
  if (completion.advantage == null) return "No update used this completion.";
  return !codes && advantage?.[n] === 0 ? "No gradient: the advantage is 0." : "";
}
