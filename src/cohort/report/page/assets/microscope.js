// The microscope: choose a step, a group and a completion; filter; see the group side by side.

const scope = { group: 0, completion: -1, quantity: "", matches: null };
const sampled = () => DATA.microscope;

function startMicroscope() {
  if (!sampled()?.groups.length) return;
  const { steps, completions, opens } = sampled(), cards = byId("cards");
  fill(byId("step"), steps.map(({ step, why }) => [String(step), `${step}: ${why}`]));
  byId("step").addEventListener("change", (event) => chooseStep(event.target.selectedIndex));
  byId("group").addEventListener("change", (event) => chooseGroup(Number(event.target.value)));
  byId("quantity").addEventListener("change", (event) => { scope.quantity = event.target.value; showGroup(); });
  for (const button of document.querySelectorAll("[data-go]")) button.addEventListener("click", () => go(button.dataset.go));
  fill(byId("finish"), [["", "any"], ...[...new Set(completions.finish)].map((name) => [name, name])]);
  const fields = [...byId("filters").querySelectorAll("input, select")];
  for (const field of fields) field.addEventListener("input", filter);
  byId("clear").addEventListener("click", () => {
    for (const field of fields) field.value = "";
    filter();
  });
  cards.addEventListener("pointerover", (event) => point(event.target.closest(".t")));
  cards.addEventListener("pointerleave", hidePointer);
  cards.addEventListener("click", (event) => { const node = event.target.closest(".t"); if (node) setToken(node); });
  addEventListener("scroll", hidePointer, { passive: true });
  chooseStep(steps.findIndex(({ step }) => step === opens));
}

/** Step through steps, groups or completions. */
function go(where) {
  const { groups, steps } = sampled(), [what, way] = where.split(" "), by = way === "next" ? 1 : -1;
  if (what === "group") return chooseGroup(Math.min(groups.length - 1, Math.max(0, scope.group + by)));
  if (what === "completion") return chooseCompletion(scope.completion + by);
  const at = steps.findIndex(({ step }) => step === groups[scope.group].step) + by;
  if (steps[at]) chooseStep(at);
}

/** Show the first group of a step; -1: of the last step. */
function chooseStep(at) {
  const { groups, steps } = sampled(), chosen = steps.at(at).step;
  chooseGroup(groups.findIndex(({ step }) => step === chosen));
}

async function chooseGroup(index, completion = -1) {
  const { groups } = sampled(), { step } = groups[index];
  Object.assign(scope, { group: index, completion });
  byId("step").value = String(step);
  const here = groups.map((one, at) => [at, one]).filter(([, one]) => one.step === step);
  fill(byId("group"), here.map(([at, one]) => [String(at), `${one.group}: ${one.why}`]), String(index));
  await showGroup();
}

const LEVELS = [-6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6];

/** Show the chosen group: its prompt, its completions, and the legend of the colours. */
async function showGroup() {
  const index = scope.group, header = await group(index);
  if (index !== scope.group) return;
  hidePointer();
  const usable = DATA.quantities.filter(({ key }) => hasQuantity(header, key));
  const chosen = usable.find(({ key }) => key === scope.quantity) ?? usable[0], scale = scaleOf(header, chosen);
  scope.quantity = chosen?.key || "";
  fill(byId("quantity"), usable.map(({ key, label }) => [key, label]), scope.quantity);
  byId("about-quantity").textContent = chosen?.about || "";
  const levels = LEVELS.filter((level) => (chosen?.scale === "positive" ? level > 0 : chosen?.scale === "negative" ? level < 0 : true));
  const bar = el("span", { class: "scale" }, ...levels.map((level) => el("i", { class: shade(level).trim() })));
  byId("legend").replaceChildren(...(scale.ends ? [num(scale.ends[0], 3), bar, num(scale.ends[1], 3)] : []));
  byId("prompt").replaceChildren(...visible(header.prompt));
  byId("prompt-about").textContent = [`row ${header.row}`, header.source && `source ${header.source}`].filter(Boolean).join(", ");
  byId("notes").replaceChildren(...header.notes.map((note) => el("p", { class: "soft small" }, note)));
  byId("cards").replaceChildren(...header.completions.map((completion, at) => card(header, completion, at, scale)));
  markChosen(false);
  dimOthers();
}

const RENDERED = 500, RENDERED_CHOSEN = 4000;

/** A completion of the group. */
function card(header, completion, at, scale) {
  const { number, reward, advantage, drawn, finish, details, error, text } = completion, rewards = Object.entries(completion.rewards);
  const box = el("div", { class: "tokens", "data-tokens": true, tabindex: 0, role: "group", "aria-label": `Tokens of completion ${number}`, keydown: moveToken });
  box.render = (size) => renderTokens(box, header, completion, scope.quantity, scale, size);
  Object.assign(box, { header, completion });
  box.render(RENDERED);
  const facts = [`reward ${num(reward)}`, advantage == null ? "not used" : `advantage ${num(advantage, 4, "+")}`, plural(drawn, "token"), finish];
  const named = rewards.length > 1 || (rewards.length && details.length) ? [...rewards, ...details] : [];
  const values = named.map(([name, value]) => el("span", {}, ...visible(name), " ", el("b", {}, ...visible(typeof value === "string" ? value : num(value)))));
  return el("article", { class: "card", "aria-label": `Completion ${number}` },
    el("header", { click: () => chooseCompletion(at === scope.completion ? -1 : at) },
      el("button", { type: "button" }, `#${number}`), ...facts.map((fact) => el("span", {}, fact))),
    values.length ? el("div", { class: "rewards" }, ...values) : null,
    error ? el("div", { class: "rewards" }, ...visible(error)) : null,
    header.vocabulary ? null : el("pre", { class: "tokens" }, ...visible(text)),
    box, completion.messages ? messages(completion.messages) : null);
}

/** The turns of an episode as messages. */
function messages(list) {
  return el("details", {}, el("summary", { class: "small" }, "Messages"), ...list.map(({ role, content, calls }) =>
    el("div", { class: `message ${role === "tool" || role === "assistant" ? role : ""}` }, el("div", { class: "role" }, ...visible(role)),
      ...[content, ...calls].map((text) => el("pre", {}, ...visible(text))))));
}

function chooseCompletion(at) {
  scope.completion = Math.min(byId("cards").children.length - 1, Math.max(-1, at));
  markChosen(true);
}

function markChosen(move) {
  [...byId("cards").children].forEach((node, at) => {
    const chosen = at === scope.completion;
    node.classList.toggle("chosen", chosen);
    node.toggleAttribute("aria-current", chosen);
    if (chosen) node.querySelector("[data-tokens]").render(RENDERED_CHOSEN);
    if (chosen && move) node.scrollIntoView({ block: "nearest" });
  });
}

// Filters ----------------------------------------------------------------------------------------------------------

const LISTED = 200;

/** List the completions that pass the filters, and dim the others of the group; without a filter, neither. */
function filter() {
  const { groups, completions: all } = sampled(), value = (name) => byId(name).value.trim();
  const tests = [
    ["reward-low", (i, bound) => all.reward[i] !== null && all.reward[i] >= bound],
    ["reward-high", (i, bound) => all.reward[i] !== null && all.reward[i] <= bound],
    ["length-low", (i, bound) => all.drawn[i] >= bound],
    ["length-high", (i, bound) => all.drawn[i] <= bound],
    ["finish", (i, name) => all.finish[i] === name],
    ["clipped", (i, answer) => (all.clipped[i] > 0) === (answer === "yes")],
  ].filter(([name]) => value(name) !== "");
  const found = tests.length ? [...all.group.keys()].filter((i) => tests.every(([name, test]) => test(i, value(name)))) : null;
  scope.matches = found && new Set(found.map((i) => `${all.group[i]} ${all.at[i]}`));
  byId("matches").hidden = !found;
  byId("count").textContent = found ? `${found.length.toLocaleString("en")} of ${plural(all.group.length, "completion")}` : "";
  byId("matches").replaceChildren(...(found || []).slice(0, LISTED).map((i) => {
    const index = all.group[i], { step, group: name } = groups[index];
    return el("button", { type: "button", click: () => chooseGroup(index, all.at[i]) },
      `step ${step}, group ${name}, #${all.number[i]}: reward ${num(all.reward[i])}, ${plural(all.drawn[i], "token")}, ${all.finish[i]}`);
  }));
  if (found?.length > LISTED) byId("matches").append(el("p", { class: "soft small" }, `The first ${LISTED} are listed.`));
  dimOthers();
}

function dimOthers() {
  [...byId("cards").children].forEach((node, at) => node.classList.toggle("dimmed", Boolean(scope.matches) && !scope.matches.has(`${scope.group} ${at}`)));
}

// The pointer, by mouse or keyboard --------------------------------------------------------------------------------

const hidePointer = () => { byId("pointer").hidden = true; };

function point(node) {
  const box = node?.closest(".tokens");
  if (box) showPointer(box.header, box.completion, node);
  else hidePointer();
}

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
  if (!tokens[to]) return;
  event.preventDefault();
  event.stopPropagation();
  setToken(tokens[to]);
}

/** The nearest token of the next line up or down; null for other keys. */
function lineMove(tokens, at, key) {
  const sign = { ArrowUp: -1, ArrowDown: 1 }[key];
  if (!sign || at < 0) return sign ? 0 : null;
  const boxes = tokens.map((node) => node.getBoundingClientRect()), { top, left } = boxes[at];
  const far = boxes.map((box) => (sign * (box.top - top) > 2 ? Math.abs(box.top - top) * 1000 + Math.abs(box.left - left) : Infinity));
  const nearest = far.reduce((best, distance, index) => (distance < far[best] ? index : best), at);
  return nearest === at ? null : nearest;
}
