// The start of the page: theme, keys, print.

const root = document.documentElement;

function setTheme(theme) {
  if (theme) root.dataset.theme = theme;
  else delete root.dataset.theme;
  try { localStorage.setItem("cohort-theme", theme); } catch { /* the browser keeps nothing for files */ }
  redraw();
}

const systemDark = matchMedia("(prefers-color-scheme: dark)");
const toggleTheme = () => setTheme((root.dataset.theme ? root.dataset.theme === "dark" : systemDark.matches) ? "light" : "dark");
const IN_MICROSCOPE = {
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
  if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  const keys = { t: toggleTheme, "?": () => byId("help")?.showModal(), ...(sampled()?.groups.length ? IN_MICROSCOPE : {}) };
  if (!Object.hasOwn(keys, event.key)) return;
  event.preventDefault();
  keys[event.key]();
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
systemDark.addEventListener("change", () => redraw());
addEventListener("keydown", onKey);
addEventListener("beforeprint", beforePrint);
addEventListener("afterprint", afterPrint);
startCharts();
startMicroscope();
root.dataset.ready = "";
