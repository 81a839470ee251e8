// The start of the page: theme, keys, print.

const root = document.documentElement;

function setTheme(theme) {
  if (theme) root.dataset.theme = theme;
  else delete root.dataset.theme;
  try { localStorage.setItem("cohort-theme", theme); } catch { /* the browser keeps nothing for files */ }
  redraw();
}

const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
const toggleTheme = () => setTheme(isDark() ? "light" : "dark");

const KEYS = {
  t: toggleTheme,
  "/": () => byId("search")?.focus(),
  "?": () => byId("help")?.showModal(),
  ",": () => go("step previous"), ".": () => go("step next"),
  "[": () => go("group previous"), "]": () => go("group next"),
  j: () => go("completion next"), k: () => go("completion previous"),
  c: () => {
    const select = byId("quantity");
    select.selectedIndex = (select.selectedIndex + 1) % select.options.length;
    select.dispatchEvent(new Event("change"));
  },
};

function onKey(event) {
  const typing = event.target.matches("input, select, textarea");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(KEYS, event.key)) return;
  if (",.[]jkc/".includes(event.key) && !sampled()?.groups.length) return;
  event.preventDefault();
  KEYS[event.key]();
}

/** Print in light colours, with all charts. */
function beforePrint() {
  root.dataset.before = root.dataset.theme || "";
  root.dataset.theme = "light";
  drawForPrint();
}

function afterPrint() {
  setTheme(root.dataset.before);
  delete root.dataset.before;
}

try { if (localStorage.getItem("cohort-theme")) root.dataset.theme = localStorage.getItem("cohort-theme"); } catch { /* as above */ }
byId("theme").addEventListener("click", toggleTheme);
byId("keys-help")?.addEventListener("click", () => byId("help").showModal());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());
addEventListener("keydown", onKey);
addEventListener("beforeprint", beforePrint);
addEventListener("afterprint", afterPrint);
startCharts();
startMicroscope();
root.dataset.ready = "";
