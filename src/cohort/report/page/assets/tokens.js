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
  const length = new DataView(bytes.buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  let at = 4 + length;
  header.arrays = Object.fromEntries(header.arrays.map(([name, kind, count]) => {
    const size = kind === "u1" ? 1 : 4, planes = bytes.subarray(at, at += size * count);
    return [name, kind === "u1" ? planes : new (kind === "f4" ? Float32Array : Int32Array)(merged(planes, count).buffer)];
  }));
  header.spell = speller(header.vocabulary);
  return header;
}

/** Numbers whose bytes are stored plane by plane, lowest first, because that deflates better. */
function merged(planes, count) {
  const bytes = new Uint8Array(4 * count);
  for (let plane = 0; plane < 4; plane++)
    for (let i = 0, from = plane * count; i < count; i++) bytes[4 * i + plane] = planes[from + i];
  return bytes;
}

/** Token id -> its text, or its bytes if they are only a part of a character. */
function speller(vocabulary) {
  if (!vocabulary) return null;
  const pieces = new Map(vocabulary.ids.map((id, index) => [id, vocabulary.pieces[index]]));
  const special = new Set(vocabulary.special);
  return { piece: (id) => pieces.get(id) ?? `⟨${id}⟩`, isSpecial: (id) => special.has(id) };
}

/** The tokens of a completion as pieces of text. Several tokens that make one character are one piece. */
function piecesOf(header, completion) {
  const [from, to] = completion.t, ids = header.arrays.ids, pieces = [], decoder = new TextDecoder("utf-8", { fatal: true });
  for (let i = from; i < to; i++) {
    const piece = header.spell ? header.spell.piece(ids[i]) : `${ids[i]} `;
    if (typeof piece === "string") { pieces.push({ text: piece, first: i, count: 1 }); continue; }
    const bytes = [];
    let text = null, j = i;
    for (; j < to && text === null && bytes.length < 8; j++) {
      const more = header.spell.piece(ids[j]);
      if (typeof more === "string") break;
      bytes.push(...more);
      try { text = decoder.decode(new Uint8Array(bytes)); } catch { text = null; }
    }
    if (text === null) { j = i + 1; text = bytes.length ? hexOf(header.spell.piece(ids[i])) : "�"; }
    pieces.push({ text, first: i, count: j - i });
    i = j - 1;
  }
  return pieces;
}

const hexOf = (bytes) => bytes.map((byte) => `⟨${byte.toString(16).toUpperCase().padStart(2, "0")}⟩`).join("");

/** Place of a token among the drawn tokens of its group; -1: the policy did not draw it. */
function drawnIndex(header, token) {
  if (!header.drawn) {
    let next = 0;
    const flags = header.arrays.drawn;
    header.drawn = Int32Array.from(header.arrays.ids, (_, i) => (!flags || flags[i] ? next++ : -1));
  }
  return header.drawn[token];
}

const log = Math.log;
/** Quantities that follow from others. k3 is the non-negative estimator of KL(policy || reference). */
const DERIVED = {
  kl: { from: ["logps", "ref_logps"], value: (a, n) => { const d = a.ref_logps[n] - a.logps[n]; return Math.exp(d) - 1 - d; } },
  gap: { from: ["logps", "sampler_logps"], value: (a, n) => (a.old_logps || a.logps)[n] - (a.full_logps || a.sampler_logps)[n] },
  coefficient: { from: ["policy_coefficient"], value: (a, n) => a.policy_coefficient[n] + (a.kl_coefficient?.[n] || 0) },
};

function quantity(header, key, n) {
  const derived = DERIVED[key];
  if (!derived) return header.arrays[key]?.[n];
  return derived.from.every((name) => header.arrays[name]) ? derived.value(header.arrays, n) : undefined;
}

const hasQuantity = (header, key) => (DERIVED[key]?.from || [key]).every((name) => header.arrays[name]);

/** How a value is coloured: -6..6, from the scale of its quantity over the group. */
function scaleOf(header, { key, scale }) {
  const found = [], count = header.completions.at(-1)?.n[1] || 0;
  for (let n = 0; n < count; n++) {
    const value = quantity(header, key, n);
    if (Number.isFinite(value)) found.push(Math.abs(scale === "ratio" ? log(Math.max(value, 1e-9)) : value));
  }
  found.sort((a, b) => a - b);
  const reach = found.length ? found[Math.floor(0.98 * (found.length - 1))] || found.at(-1) : 0;
  const level = (value) => {
    if (!Number.isFinite(value) || !reach) return 0;
    const distance = (scale === "ratio" ? log(Math.max(value, 1e-9)) : value) / reach, size = Math.abs(distance);
    const share = scale === "positive" || scale === "negative" ? Math.sqrt(size) : size;  // most are near 0
    return Math.sign(distance) * Math.min(6, Math.ceil(share * 6 - 0.5));
  };
  const ends = scale === "ratio" ? [Math.exp(-reach), Math.exp(reach)] : scale === "positive" ? [0, reach] : scale === "negative" ? [-reach, 0] : [-reach, reach];
  return { level, ends, known: found.length > 0 };
}

const shade = (level) => (level ? ` ${level < 0 ? "n" : "p"}${Math.abs(level)}` : "");

/** The element of a piece. */
function tokenElement(header, piece, key, scale) {
  const n = drawnIndex(header, piece.first), id = header.arrays.ids[piece.first];
  let kind = n < 0 ? "t given" : `t${shade(scale.level(quantity(header, key, n)))}`;
  if (header.spell?.isSpecial(id)) kind += " special";
  if (piece.count > 1) kind += " joined";
  const node = el("span", { class: kind });
  node.dataset.i = piece.first;
  node.dataset.count = piece.count;
  for (const part of piece.text.split(/(\n)/))
    if (part === "\n") node.append(el("span", { class: "end" }, "↵"), "\n");
    else if (part) node.append(...visible(part));
  return node;
}

/** Render tokens into a box, `size` at a time; more when the reader comes to the end. */
function renderTokens(box, header, completion, key, scale, size) {
  const pieces = piecesOf(header, completion), turns = turnStarts(header, completion);
  let next = 0;
  const more = el("button", { type: "button", click: () => append() });
  const append = () => {
    const until = next + size;
    const part = document.createDocumentFragment();
    for (; next < Math.min(until, pieces.length); next++) {
      const piece = pieces[next];
      if (completion.gap && piece.first === completion.t[0] + completion.gap[0])
        part.append(el("span", { class: "turn" }, `${plural(completion.gap[1], "token")} left out of this page`));
      if (turns.has(piece.first)) part.append(el("span", { class: "turn" }, turns.get(piece.first)));
      part.append(tokenElement(header, piece, key, scale));
    }
    more.before(part);
    more.hidden = next >= pieces.length;
    more.textContent = `Show more of ${plural(completion.tokens, "token")}`;
  };
  box.replaceChildren(more);
  append();
  box.onscroll = () => { if (!more.hidden && box.scrollTop + box.clientHeight > box.scrollHeight - 300) append(); };
}

/** Where the turns of a trajectory begin, and where answers that the policy read begin. */
function turnStarts(header, completion) {
  const starts = new Map(), flags = header.arrays.drawn, [from, to] = completion.t;
  if (!flags) return starts;
  let turn = 0, left = 0;
  const lengths = completion.turns || [], resumed = completion.gap ? from + completion.gap[0] : -1;
  const next = () => { do left = lengths[turn++] ?? Infinity; while (left <= 0); };
  for (let i = from; i < to; i++) {
    if (i === resumed) {  // the tokens that are left out belong to turns, too
      for (let skipped = completion.drawn - (completion.n[1] - completion.n[0]); skipped > 0;) {
        if (!left) next();
        const taken = Math.min(left, skipped);
        left -= taken;
        skipped -= taken;
      }
    }
    if (!flags[i]) {
      if (i === resumed || (i > from && flags[i - 1])) starts.set(i, "answer, not drawn by the policy");
    } else if (!left || i === resumed) {
      const goes = left > 0;
      if (!goes) next();
      left--;
      starts.set(i, `turn ${turn}, drawn by the policy${goes ? ", goes on" : ""}`);
    } else left--;
  }
  return starts;
}

// The pointer ------------------------------------------------------------------------------------------------------

/** Show the numbers of a token beside it. */
function showPointer(header, completion, node) {
  const box = byId("pointer"), first = Number(node.dataset.i), count = Number(node.dataset.count);
  const rows = [];
  for (let i = first; i < first + count; i++) rows.push(...describeToken(header, completion, i, count > 1));
  box.replaceChildren(...rows);
  box.hidden = false;
  const at = node.getClientRects()[0] || node.getBoundingClientRect(), gap = 8;
  const below = at.bottom + gap + box.offsetHeight < innerHeight;
  box.style.left = `${Math.max(4, Math.min(at.left, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${Math.max(4, below ? at.bottom + gap : at.top - box.offsetHeight - gap)}px`;
}

function describeToken(header, completion, token, partial) {
  const n = drawnIndex(header, token), id = header.arrays.ids[token];
  const place = token - completion.t[0], skipped = completion.gap && place >= completion.gap[0] ? completion.gap[1] : 0;
  const piece = header.spell?.piece(id);
  const text = typeof piece === "string" ? JSON.stringify(piece) : piece ? hexOf(piece) : "";
  const head = el("div", {}, el("span", { class: "token" }, ...visible(text)), ` id ${id}, token ${place + skipped + 1} of ${completion.tokens}`);
  const found = [head];
  if (partial) found.push(el("div", { class: "soft" }, "part of a character"));
  if (n < 0) return [...found, el("div", { class: "soft" }, "Given to the policy, not drawn: it is read and has no gradient.")];
  const rows = DATA.quantities.map(({ key, label }) => [label, quantity(header, key, n)]).filter(([, value]) => value !== undefined && !Number.isNaN(value));
  found.push(el("table", {}, ...rows.map(([label, value]) => el("tr", {}, el("th", {}, label), el("td", { class: "number" }, num(value, 5))))));
  const cause = causeOf(header, completion, n);
  if (cause) found.push(el("div", {}, cause));
  return found;
}

/** Why a drawn token has no policy gradient, in words; empty if it has one or nobody knows. */
function causeOf(header, completion, n) {
  const code = header.arrays.no_gradient?.[n];
  if (code !== undefined && code < 255) {
    const name = header.causes[code];
    return name === "held" ? "It has a gradient; its log-ratio was clamped to 20." : `No gradient: ${DATA.causes[name] || name}.`;
  }
  if (completion.advantage == null) return "No update used this completion.";
  if (!header.arrays.no_gradient && header.arrays.advantage?.[n] === 0)
    return "No gradient: the advantage is 0.";
  return "";
}
