// The microscope: choose a step, a group and a completion; filter and search; see the group side by side.

const scope = { group: 0, completion: -1, quantity: "", matches: null };

const sampled = () => DATA.microscope;

function startMicroscope() {
  if (!sampled()?.groups.length) return;
  const { groups, steps } = sampled();
  fill(byId("step"), steps.map(({ step, why }) => [String(step), `${step}: ${why}`]));
  byId("step").addEventListener("change", (event) => chooseGroup(groups.findIndex(({ step }) => step === Number(event.target.value))));
  byId("group").addEventListener("change", (event) => chooseGroup(Number(event.target.value)));
  byId("quantity").addEventListener("change", (event) => { scope.quantity = event.target.value; showGroup(); });
  for (const button of document.querySelectorAll("[data-go]")) button.addEventListener("click", () => go(button.dataset.go));
  fill(byId("finish"), [["", "any"], ...sampled().finishes.map((name) => [name, name])]);
  let waiting;
  for (const field of byId("filters").querySelectorAll("input, select"))
    field.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(filter, 150); });
  byId("clear").addEventListener("click", () => {
    for (const field of byId("filters").querySelectorAll("input, select")) field.value = "";
    filter();
  });
  byId("cards").addEventListener("pointerover", (event) => point(event.target.closest(".t")));
  byId("cards").addEventListener("pointerleave", hidePointer);
  byId("cards").addEventListener("click", (event) => { const node = event.target.closest(".t"); if (node) setToken(node); });
  addEventListener("scroll", hidePointer, { passive: true });
  const opens = steps.find(({ step }) => step === sampled().opens) ?? steps.at(-1);
  chooseGroup(groups.findIndex(({ step }) => step === opens.step));
}

/** Step through steps, groups or completions. */
function go(where) {
  const { groups, steps } = sampled(), [what, by] = [where.split(" ")[0], where.endsWith("next") ? 1 : -1];
  if (what === "group") return chooseGroup(Math.min(groups.length - 1, Math.max(0, scope.group + by)));
  if (what === "completion") return chooseCompletion(scope.completion + by);
  const at = steps.findIndex(({ step }) => step === groups[scope.group].step) + by;
  if (steps[at]) chooseGroup(groups.findIndex(({ step }) => step === steps[at].step));
}

async function chooseGroup(index, completion = -1) {
  if (index < 0) return;
  const { groups } = sampled(), { step } = groups[index];
  Object.assign(scope, { group: index, completion });
  byId("step").value = String(step);
  const here = groups.map((one, at) => [at, one]).filter(([, one]) => one.step === step);
  fill(byId("group"), here.map(([at, one]) => [String(at), `${one.group}: ${one.why}`]), String(index));
  await showGroup();
}

/** Show the chosen group: its prompt, its completions, and the legend of the colours. */
async function showGroup() {
  const index = scope.group, header = await group(index);
  if (index !== scope.group) return;
  hidePointer();
  const usable = DATA.quantities.filter(({ key }) => hasQuantity(header, key));
  if (!usable.some(({ key }) => key === scope.quantity)) scope.quantity = usable[0]?.key || "";
  fill(byId("quantity"), usable.map(({ key, label }) => [key, label]), scope.quantity);
  const chosen = usable.find(({ key }) => key === scope.quantity), scale = scaleOf(header, chosen || { key: "", scale: "diverging" });
  byId("prompt").replaceChildren(...visible(header.prompt));
  byId("prompt-about").textContent = [`row ${header.row}`, header.source && `source ${header.source}`].filter(Boolean).join(", ");
  showLegend(chosen, scale);
  byId("notes").replaceChildren(...header.notes.map((note) => el("p", { class: "soft small" }, note)));
  byId("cards").replaceChildren(...header.completions.map((completion, at) => card(header, completion, at, scale)));
  markChosen(false);
  dimOthers();
}

function showLegend(chosen, { ends, known }) {
  const levels = { positive: [1, 2, 3, 4, 5, 6], negative: [-6, -5, -4, -3, -2, -1] }[chosen?.scale] || [-6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6];
  const bar = el("span", { class: "scale" }, ...levels.map((level) => el("i", { class: shade(level).trim() })));
  byId("legend").replaceChildren(...(chosen && known ? [num(ends[0], 3), bar, num(ends[1], 3)] : []));
  byId("about-quantity").textContent = chosen?.about || "";
}

const RENDERED = 500, RENDERED_CHOSEN = 4000;

/** A completion of the group. */
function card(header, completion, at, scale) {
  const box = el("div", { class: "tokens", "data-tokens": true, tabindex: 0, role: "group", "aria-label": `Tokens of completion ${completion.number}`, keydown: moveToken });
  const rewards = Object.entries(completion.rewards);
  const facts = [
    `reward ${num(completion.reward)}`,
    completion.advantage == null ? "not used" : `advantage ${signed(completion.advantage)}`,
    plural(completion.drawn, "token"), completion.finish,
  ];
  const node = el("article", { class: "card", "aria-label": `Completion ${completion.number}` },
    el("header", { click: () => chooseCompletion(at === scope.completion ? -1 : at) }, el("button", { type: "button" }, `#${completion.number}`), ...facts.map((fact) => el("span", {}, fact))),
    rewards.length > 0 && (rewards.length > 1 || completion.details.length > 0)
      ? el("div", { class: "rewards" }, ...[...rewards, ...completion.details].map(([name, value]) =>
        el("span", {}, ...visible(name), " ", el("b", {}, ...visible(typeof value === "number" || value == null ? num(value) : value)))))
      : null,
    completion.error ? el("div", { class: "rewards" }, ...visible(completion.error)) : null,
    header.spell ? null : el("pre", { class: "tokens" }, ...visible(completion.text)),
    box);
  if (completion.messages) node.append(messages(completion.messages));
  box.render = (size) => renderTokens(box, header, completion, scope.quantity, scale, size);
  Object.assign(box, { header, completion });
  box.render(RENDERED);
  return node;
}

/** The turns of an episode as messages. */
function messages(list) {
  return el("details", {}, el("summary", { class: "small" }, "Messages"), ...list.map(({ role, content, calls }) =>
    el("div", { class: `message ${role === "tool" || role === "assistant" ? role : ""}` }, el("div", { class: "role" }, ...visible(role)),
      el("pre", {}, ...visible(content)), ...calls.map((call) => el("pre", {}, ...visible(call))))));
}

function chooseCompletion(at) {
  const count = byId("cards").children.length;
  scope.completion = Math.min(count - 1, Math.max(-1, at));
  markChosen(true);
}

function markChosen(move) {
  [...byId("cards").children].forEach((node, at) => {
    const chosen = at === scope.completion;
    node.classList.toggle("chosen", chosen);
    node.toggleAttribute("aria-current", chosen);
    const box = node.querySelector("[data-tokens]");
    if (chosen) box.render(RENDERED_CHOSEN);
    if (chosen && move) node.scrollIntoView({ block: "nearest" });
  });
}

// Filters and search -----------------------------------------------------------------------------------------------

const lower = (text) => text.toLocaleLowerCase();

/** The completions that pass the filters; null without a filter. */
async function filter() {
  const value = (name) => byId(name).value.trim(), number = (name) => (value(name) === "" ? null : Number(value(name)));
  const wanted = { text: lower(value("search")), low: number("reward-low"), high: number("reward-high"),
    short: number("length-low"), long: number("length-high"), finish: byId("finish").value, clipped: byId("clipped").value };
  const active = Object.values(wanted).some((one) => one !== null && one !== "");
  const found = active ? await matching(wanted) : null;
  scope.matches = found && new Set(found.map(({ group: g, at }) => `${g} ${at}`));
  showMatches(found, wanted.text);
  dimOthers();
}

async function matching(wanted) {
  const { completions: all, finishes } = sampled(), found = [];
  for (let i = 0; i < all.group.length; i++) {
    const reward = all.reward[i], length = all.length[i];
    if (wanted.low !== null && !(reward !== null && reward >= wanted.low)) continue;
    if (wanted.high !== null && !(reward !== null && reward <= wanted.high)) continue;
    if (wanted.short !== null && length < wanted.short) continue;
    if (wanted.long !== null && length > wanted.long) continue;
    if (wanted.finish && finishes[all.finish[i]] !== wanted.finish) continue;
    if (wanted.clipped && (all.clipped[i] > 0) !== (wanted.clipped === "yes")) continue;
    const text = (await group(all.group[i])).completions[all.at[i]].text;
    const where = wanted.text ? lower(text).indexOf(wanted.text) : 0;
    if (where >= 0) found.push({ group: all.group[i], at: all.at[i], number: all.number[i], reward, length, finish: finishes[all.finish[i]], text, where });
  }
  return found;
}

const LISTED = 200;

function showMatches(found, text) {
  const box = byId("matches"), { groups, completions } = sampled();
  box.hidden = !found;
  byId("count").textContent = found ? `${found.length.toLocaleString("en")} of ${plural(completions.group.length, "completion")}` : "";
  box.replaceChildren(...(found || []).slice(0, LISTED).map((one) => {
    const { step, group: name } = groups[one.group], from = Math.max(0, one.where - 30);
    const parts = text ? [one.text.slice(from, one.where), el("mark", {}, ...visible(one.text.slice(one.where, one.where + text.length))), one.text.slice(one.where + text.length, one.where + 160)] : [one.text.slice(0, 160)];
    return el("button", { type: "button", click: () => chooseGroup(one.group, one.at) },
      el("span", {}, `step ${step}, group ${name}, #${one.number}: reward ${num(one.reward)}, ${plural(one.length, "token")}, ${one.finish}`),
      el("span", { class: "snippet mono" }, ...parts.flatMap((part) => (typeof part === "string" ? visible(part.replaceAll("\n", "↵")) : [part]))));
  }));
  if (found?.length > LISTED) box.append(el("p", { class: "soft small" }, `The first ${LISTED} are listed.`));
}

function dimOthers() {
  [...byId("cards").children].forEach((node, at) => node.classList.toggle("dimmed", Boolean(scope.matches) && !scope.matches.has(`${scope.group} ${at}`)));
}

// The pointer, by mouse or keyboard --------------------------------------------------------------------------------

function point(node) {
  const box = node?.closest(".tokens");
  if (box?.header) showPointer(box.header, box.completion, node);
  else hidePointer();
}

const hidePointer = () => { byId("pointer").hidden = true; };

function setToken(node) {
  byId("cards").querySelector(".t.at")?.classList.remove("at");
  node.classList.add("at");
  node.scrollIntoView({ block: "nearest" });
  point(node);
}

/** Left and right go from token to token; up and down by lines; Home and End to the ends. */
function moveToken(event) {
  const tokens = [...event.currentTarget.querySelectorAll(".t")], at = tokens.findIndex((node) => node.classList.contains("at"));
  if (event.key === "Escape") return hidePointer();
  const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: tokens.length - 1 }[event.key] ?? lineMove(tokens, at, event.key);
  if (to == null || !tokens[to]) return;
  event.preventDefault();
  event.stopPropagation();
  setToken(tokens[to]);
}

function lineMove(tokens, at, key) {
  if (key !== "ArrowUp" && key !== "ArrowDown") return null;
  if (at < 0) return 0;
  const box = tokens[at].getBoundingClientRect(), down = key === "ArrowDown";
  let best = null, nearest = Infinity;
  tokens.forEach((node, index) => {
    const other = node.getBoundingClientRect(), far = Math.abs(other.top - box.top);
    if (down ? other.top <= box.top + 2 : other.top >= box.top - 2) return;
    const distance = far * 1000 + Math.abs(other.left - box.left);
    if (distance < nearest) [best, nearest] = [index, distance];
  });
  return best;
}
