// Curves. Each chart is drawn when it comes into view; all charts of the page share the pointer's step.

const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 2], [1, 2]];
const charts = [];
const HEIGHT = 180;
const view = { smooth: 0, axis: "step" };

/** The value of a CSS colour variable under the present theme. */
function colour(name) {
  const probe = byId("probe");
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

const faint = (rgb, alpha) => rgb.replace(/^rgba?\(([^)]*)\)$/, (_, parts) => `rgba(${parts.split(",").slice(0, 3)},${alpha})`);

/**
 * A smooth curve without lag, and its 95% band: at each point the least-squares line through the `width` points around
 * it, weighted by (1 - (d / D)^3)^3. The same as `series.loess` in Python, which says what is computed and why; `t` is
 * the 97.5% quantile of Student's t with `width - 2` degrees of freedom. A curve of fewer points has no fit.
 */
function localFit(values, width, t) {
  const known = values.flatMap((value, i) => (value == null ? [] : [i])), count = known.length;
  if (count < width) return null;
  const mean = values.map(() => null), low = [...mean], high = [...mean], norms = [], sums = [0];
  const first = (i) => Math.max(0, Math.min(count - width, i - (width - 1) / 2));
  known.forEach((place, i) => {
    const start = first(i), far = 1 + Math.max(i - start, start + width - 1 - i);
    let [s0, s1, s2, y0, y1, q0, q1, q2] = [0, 0, 0, 0, 0, 0, 0, 0];  // of weights, of values, of squared weights
    for (let k = start; k < start + width; k++) {
      const d = k - i, share = Math.abs(d) / far, rest = 1 - share * share * share, w = rest * rest * rest, y = values[known[k]];
      s0 += w; s1 += w * d; s2 += w * d * d;
      y0 += w * y; y1 += w * d * y;
      q0 += w * w; q1 += w * w * d; q2 += w * w * d * d;
    }
    const det = s0 * s2 - s1 * s1;
    mean[place] = (s2 * y0 - s1 * y1) / det;
    norms.push((s2 * s2 * q0 - 2 * s1 * s2 * q1 + s1 * s1 * q2) / det ** 2);
    sums.push(sums[i] + (values[place] - mean[place]) ** 2 / (1 - 2 * s2 / det + norms[i]));
  });
  known.forEach((place, i) => {
    const start = first(i), reach = t * Math.sqrt(Math.max(0, sums[start + width] - sums[start]) / width * norms[i]);
    low[place] = mean[place] - reach;
    high[place] = mean[place] + reach;
  });
  return { mean, low, high };
}

/** The fit of a curve over the chosen window, null without one; on a logarithmic axis, that of the logarithms. */
function fitOf(values, log) {
  if (view.smooth <= 1) return null;
  const t = new Map(DATA.run.windows).get(view.smooth);
  if (!log) return localFit(values, view.smooth, t);
  const fit = localFit(values.map((value) => (value > 0 ? Math.log(value) : null)), view.smooth, t);
  const back = (some) => some.map((value) => (value == null ? null : Math.exp(value)));
  return fit && { mean: back(fit.mean), low: back(fit.low), high: back(fit.high) };
}

/** Columns for uPlot, and the series that draw them. */
function seriesOf(spec, lines) {
  const columns = [], series = [], bands = [];
  const add = (values, options) => (columns.push(spec.log ? values.map((v) => (v > 0 ? v : null)) : values), series.push(options));
  lines.forEach((line, index) => {
    const stroke = colour(COLOURS[index % COLOURS.length]), dash = DASHES[Math.floor(index / COLOURS.length) % DASHES.length];
    const few = line.values.filter((value) => value != null).length < 25;
    const plain = { stroke, dash, width: 1.75, spanGaps: true, points: { show: few, size: 5 } };
    let { low, high, values } = line;
    const fit = !low && spec.smooth ? fitOf(values, spec.log) : null;
    if (fit) {
      add(values, { ...plain, stroke: faint(stroke, 0.35), width: 1, points: { show: false } });
      ({ mean: values, low, high } = fit);
    }
    if (!low && line.interval) ({ low, high } = line.interval);
    add(values, { ...plain, points: { show: few && !fit, size: 5 } });
    if (low && (!fit || lines.length <= 2)) {
      const edge = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
      add(high, edge);
      add(low, edge);
      bands.push({ series: [columns.length - 1, columns.length], fill: faint(stroke, 0.16) });
    }
  });
  return { columns, series, bands };
}

/** Findings that belong to a chart: those that name one of its metrics. */
function marksOf(spec) {
  const keys = new Set(spec.keys || []);
  return (DATA.findings || []).filter((finding) => finding.level !== "note" && finding.keys.some((key) => keys.has(key)));
}

function drawMarks(plot, marks) {
  const { ctx } = plot, { left, top, width, height } = plot.bbox, ratio = devicePixelRatio;
  for (const mark of marks) {
    const x = plot.valToPos(axisAt(mark.step), "x", true);
    if (!(x >= left && x <= left + width)) continue;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour(`--${mark.level}`);
    ctx.setLineDash([3 * ratio, 3 * ratio]);
    ctx.beginPath(); ctx.moveTo(x, top); ctx.lineTo(x, top + height); ctx.stroke();
    ctx.beginPath(); ctx.moveTo(x - 5 * ratio, top); ctx.lineTo(x + 5 * ratio, top); ctx.lineTo(x, top + 8 * ratio); ctx.fill();
    ctx.restore();
  }
}

/** Where a step lies on the chosen axis. */
function axisAt(step) {
  const { x } = DATA.run, at = x.step.findIndex((value) => value >= step);
  return at < 0 ? x[view.axis].at(-1) : x[view.axis][at];
}

/** Draw a chart into its figure, in place of the one that is there. */
function draw(chart, width = chart.place.clientWidth) {
  const { spec, place } = chart;
  if (!width) return;
  chart.plot?.destroy();
  const { x, lines } = spec.over(view.axis), { columns, series, bands } = seriesOf(spec, lines), marks = marksOf(spec);
  Object.assign(chart, { x, lines });
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const options = {
    width, height: HEIGHT, padding: [10, 16, 0, 0], bands, legend: { show: false },
    cursor: { sync: { key: "run", setSeries: false }, y: false, drag: { x: true, y: false }, points: { show: false } },
    scales: { x: { time: false }, y: { distr: spec.log ? 3 : 1, range: spec.log ? undefined : rangeOf } },
    axes: [
      { ...axis, size: 28, gap: 4, values: (_, splits) => splits.map((v) => tick(v)) },
      { ...axis, size: 54, gap: 4, values: (_, splits) => splits.map((v) => (v == null ? "" : num(v, 3))), ...(spec.log && decades(lines)) },
    ],
    series: [{}, ...series],
    hooks: { draw: [(plot) => drawMarks(plot, marks)], setCursor: [(plot) => showValues(chart, plot.cursor.idx)] },
  };
  place.replaceChildren();
  showValues(chart, null);
  chart.plot = new uPlot(options, [x, ...columns], place);
}

/** Labels and lines of a logarithmic axis: at powers of ten, unless there are too few. */
function decades(lines) {
  const known = lines.flatMap(({ values }) => values).filter((value) => value > 0);
  if (!known.length || Math.max(...known) / Math.min(...known) < 30) return {};
  const filter = (_, splits) => splits.map((value) => (Math.abs(Math.log10(value) % 1) < 1e-9 ? value : null));
  return { filter, grid: { stroke: colour("--line"), width: 1, filter } };
}

/** The numbers of a chart under the pointer; without a pointer, the last ones. */
function showValues({ spec, legend, x, lines }, index) {
  const at = (values) => (index == null ? values.findLast((value) => value != null) : values[index]);
  const where = index == null ? "last" : `${spec.axes[view.axis]} ${num(x[index])}`, several = lines.length > 1;
  legend.replaceChildren(el("span", {}, where), ...lines.map((line, i) => el("span", {},
    several ? el("i", { class: `f${(i % COLOURS.length) + 1}` }) : null, ...(several ? visible(line.label) : []), " ",
    el("b", {}, num(at(line.values))), line.low && at(line.low) != null ? ` (${num(at(line.low), 3)} to ${num(at(line.high), 3)})` : null,
    spec.log ? notDrawn(line.values) : null)));
}

/** A logarithmic axis has no place for 0: in how many points a curve is not above it. */
function notDrawn(values) {
  const zeros = values.filter((value) => value === 0).length, below = values.filter((value) => value < 0).length;
  const parts = [zeros && `0 in ${plural(zeros, "point")}`, below && `below 0 in ${plural(below, "point")}`].filter(Boolean);
  return parts.length ? `, ${parts.join(", ")} (not drawn)` : null;
}

const tick = (value) => (Number.isInteger(value) && Math.abs(value) < 1e5 ? num(value) : num(value, 3));

/** The range of a linear axis: constant curves, apart from rounding, lie in the middle. */
function rangeOf(_, low, high) {
  if (low == null) return [0, 1];
  const pad = high - low > 1e-9 * Math.abs(high) ? (high - low) * 0.08 : Math.abs(high) || 1;
  return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
}

/** What a chart shows, in a sentence for those who do not see it. */
function spoken(spec) {
  return spec.over("step").lines.map(({ label, values }) => {
    const known = values.filter((value) => value != null);
    return `${label}: first ${num(known[0])}, last ${num(known.at(-1))}, lowest ${num(Math.min(...known))}, highest ${num(Math.max(...known))}`;
  }).join("; ");
}

const inView = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) if (isIntersecting && !target.chart.plot) draw(target.chart);
}, { rootMargin: "300px" });
const onResize = new ResizeObserver((entries) => {
  for (const { target: { chart, clientWidth: width } } of entries)
    if (chart.plot && width && chart.plot.width !== width) chart.plot.setSize({ width, height: HEIGHT });
});

/** Add a chart to a place in the page. */
function addChart(parent, spec, removable = false) {
  const place = el("div", { class: "plot", tabindex: 0, role: "img", "aria-label": `${spec.title}. ${spoken(spec)}`, keydown: moveCursor });
  const legend = el("p", { class: "values" }), chart = place.chart = { spec, place, legend, plot: null };
  const remove = () => {
    chart.plot?.destroy();
    charts.splice(charts.indexOf(chart), 1);
    figure.remove();
  };
  const button = removable ? el("button", { type: "button", "aria-label": `Remove ${spec.title}`, click: remove }, "×") : null;
  const figure = el("figure", {}, el("figcaption", {}, el("span", {}, ...visible(spec.title)), button),
    el("p", { class: "about" }, ...visible(spec.about)), place, legend);
  parent.append(figure);
  charts.push(chart);
  inView.observe(place);
  onResize.observe(place);
}

/** Left and right move the pointer's step, Escape shows the whole run again. */
function moveCursor(event) {
  const { plot } = event.currentTarget.chart;
  if (!plot) return;
  if (event.key === "Escape") return void plot.setData(plot.data);
  const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
  if (!by) return;
  event.preventDefault();
  const last = plot.data[0].length - 1, at = plot.cursor.idx ?? (by > 0 ? -1 : last + 1);
  const to = Math.min(last, Math.max(0, at + by));
  plot.setCursor({ left: plot.valToPos(plot.data[0][to], "x"), top: 20 });
}

/** Draw the charts again: after a change of theme, window or axis. */
const redraw = () => charts.filter(({ plot }) => plot).forEach((chart) => draw(chart));

const PRINT_WIDTH = 310;

/** Draw all charts as wide as a column of a printed page. */
const drawForPrint = () => charts.forEach((chart) => draw(chart, PRINT_WIDTH));

/** A chart of metrics of the run, from a row of the table of charts. */
function chartOf({ title, about, keys, band, log, smooth }) {
  const { values, x, axes, intervals } = DATA.run;
  const lines = keys.map(({ key, label }) => ({ label, values: values[key], low: null, high: null, interval: intervals[key] }));
  if (band) Object.assign(lines[0], { low: values[band[0]], high: values[band[1]] });
  const over = (axis) => ({ x: x[axis], lines });
  return { title, about, log, smooth, over, axes, keys: [...keys.map(({ key }) => key), ...(band || [])] };
}

/** A chart of several runs: each has points of its own on every axis. */
function comparedOf({ title, about, log, curves }) {
  const over = (axis) => {
    const shown = curves.filter((curve) => curve[axis]);
    const [x, ...columns] = uPlot.join(shown.map((curve) => ["x", "y", "low", "high"].map((name) => curve[axis][name] || curve[axis].y)));
    const whole = columns.map((column) => Array.from(column, (value) => value ?? null));
    return { x, lines: shown.map((curve, i) => ({ label: curve.label, values: whole[3 * i],
      low: curve[axis].low && whole[3 * i + 1], high: curve[axis].low && whole[3 * i + 2] })) };
  };
  return { title, about, log, over, axes: DATA.compared.axes };
}

function startCharts() {
  const { run, compared } = DATA, { axes } = run || compared || {};
  if (!axes) return;
  const chosen = (id, entries, first, change) => {
    fill(byId(id), entries, first);
    byId(id).addEventListener("change", (event) => { change(event.target.value); redraw(); });
  };
  chosen("axis", Object.entries(axes), view.axis, (name) => { view.axis = name; });
  if (compared) for (const spec of compared.charts) addChart(byId("compared"), comparedOf(spec));
  if (!run) return;
  view.smooth = run.window;
  for (const place of document.querySelectorAll("[data-charts]"))
    for (const spec of DATA.charts.filter(({ section }) => section === place.dataset.charts)) addChart(place, chartOf(spec));
  const windows = run.windows.map(([width]) => [String(width), `${width} points`]);
  chosen("smooth", [["1", "none"], ...windows], String(run.window), (width) => { view.smooth = Number(width); });
  byId("keys").replaceChildren(...Object.keys(run.values).map((name) => el("option", { value: name })));
  const add = () => {
    const field = byId("key"), name = field.value;
    if (!Object.hasOwn(run.values, name)) return;
    addChart(byId("chosen"), chartOf({ title: name, about: "", keys: [{ key: name, label: name }], log: byId("log").checked, smooth: true }), true);
    field.value = "";
  };
  byId("add").addEventListener("click", add);
  byId("key").addEventListener("keydown", (event) => { if (event.key === "Enter") add(); });
}
