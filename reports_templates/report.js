// Draws the figures when their section opens, and adds filters and sorting. The page is otherwise complete without it.
"use strict";
const root = document.documentElement;
root.classList.add("js");
const page = JSON.parse(document.getElementById("figures")?.textContent ?? '{"columns":[],"captions":[],"figures":[]}');
const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
const all = (selector, from = document) => [...from.querySelectorAll(selector)];
for (const figure of page.figures) {
  for (const rule of figure.rules) rule.style ??= "mark";
  for (const mark of figure.marks) {
    mark.kind ??= "line";
    mark.name ??= "";
    for (const key of ["x", "y", "low", "high", "labels", "values"]) mark[key] = key in mark ? page.columns[mark[key]] : [];
  }
}

// Format numbers with three digits, and with a power of ten below 0.001.
const number = (value, digits = 3) => {
  const size = Math.abs(value);
  if (size === 0 || (size >= 1e-3 && size < 1e5)) return Number(value.toPrecision(digits)).toLocaleString("en-US", { maximumFractionDigits: 9 });
  return value.toExponential(digits - 1).replace(/\.?0*e\+?/, "e");
};
const share = (value) => Number((100 * value).toPrecision(3)) + "%";
const formatted = (axis, value) => (typeof value !== "number" ? String(value ?? "–") : axis.percent ? share(value) : number(value));
const logTicks = ([low, high]) => {
  const powers = d3.range(Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9) + 1).map((e) => Number(`1e${e}`));
  if (powers.length > 1) return powers.filter((_, place) => place % Math.ceil(powers.length / 8) === 0);
  const fine = [-1, 0].flatMap((shift) => [1, 2, 5].map((m) => m * 10 ** (Math.floor(Math.log10(low)) + 1 + shift))).filter((tick) => tick >= low && tick <= high);
  return fine.length > 1 ? fine : d3.ticks(low, high, 4);
};
const ink = (color) => (color === -1 ? "var(--faint)" : `var(--s${(color ?? 0) % 10})`);
const finite = (value) => typeof value === "number" && Number.isFinite(value);
const points = (mark) => mark.y.map((y, place) => ({
  x: mark.x[place], y, low: mark.low[place], high: mark.high[place], label: mark.labels[place], value: mark.values[place],
}));

// State of the run filter: text in the sidebar, and status in the K3 figure.
const runs = { text: "", mode: "all", pinned: new Set(), names: all(".run-link").map((link) => link.dataset.name), bad: new Set((all(".run-link.fail").length ? all(".run-link.fail") : all(".run-link.check")).map((link) => Number(link.dataset.run))) };
const matches = (run) => runs.names[run]?.toLowerCase().includes(runs.text.toLowerCase()) ?? true;
const drawn = (run) => run === undefined || (matches(run) && (runs.mode === "all" || (runs.mode === "bad" ? runs.bad.has(run) : runs.pinned.has(run))));

const extent = (spec, key, marks) => {
  const axis = spec[key];
  if (axis.limits) return axis.limits;
  const columns = key === "y" ? ["y", "low", "high"] : ["x"];
  const values = marks.flatMap((mark) => (mark.across ? (key === "x" ? ["x", "low", "high"] : []) : columns).flatMap((name) => mark[name]).filter(finite));
  const rules = spec.rules.filter((rule) => rule.axis === key && rule.style !== "usual").map((rule) => rule.at).filter(finite);
  let [low, high] = d3.extent([...values, ...rules]);
  if (low === undefined) return [0, 1];
  if (axis.scale === "log") {
    low = d3.min(values.filter((value) => value > 0)) ?? 1e-6;
    return [low / 1.25, Math.max(high, low) * 1.25];
  }
  if (axis.percent && low >= 0 && high <= 1) [low, high] = [low > 0.8 ? low : 0, Math.max(high, 0.01)];
  const room = 0.05 * (high - low) || Math.abs(high) * 0.05 || 0.5;
  return [low === 0 ? 0 : low - room, high + (axis.percent && high <= 1 ? Math.min(room, 1.02 - high) : room)];
};
// Break a long name into lines after spaces and hyphens.
const inLines = (text, most) => {
  const lines = [""];
  for (const part of text.match(new RegExp(`[^ -]{0,${most - 1}}(?:[ -]|.)|$`, "g"))) {
    if ((lines.at(-1) + part).trim().length > most) lines.push("");
    lines.push(lines.pop() + part);
  }
  return lines.map((line) => line.trim()).join("\n");
};
const charactersIn = (room) => Math.max(8, Math.floor((room - 14) / 6.7));
const scale = (axis, domain, wide, room) => {
  const options = { type: axis.scale === "band" ? "band" : axis.scale ?? "linear", label: axis.label || null, labelArrow: "none", tickSize: 0 };
  if (axis.scale === "band") return { ...options, domain, tickFormat: (text) => inLines(text, charactersIn(room)) };
  Object.assign(options, { domain, grid: true, nice: false, tickFormat: (value) => formatted(axis, value), ticks: Math.max(2, Math.min(wide ? 10 : 5, Math.floor(room / 75))) });
  if (axis.label === "step") options.ticks = Math.min(options.ticks, Math.max(Math.floor(domain[1] - domain[0]), 2)); // no half steps
  if (axis.scale === "symlog") options.constant = axis.linear_to;
  if (axis.scale === "log") options.ticks = logTicks(domain);
  const places = Array.isArray(options.ticks) ? options.ticks : d3.ticks(...domain, options.ticks);
  const digits = [3, 4, 5, 6, 7].find((count) => new Set(places.map((value) => number(value, count))).size === places.length) ?? 7;
  if (!axis.percent) options.tickFormat = (value) => number(value, digits);
  if (axis.ticks) {
    const place = (axis.scale === "symlog" ? d3.scaleSymlog().constant(axis.linear_to ?? 1) : d3.scaleLinear()).domain(domain).range([0, room]);
    const kept = new Map();
    const apart = (at, text) => [...kept].every(([other, name]) => Math.abs(place(at) - place(other)) > 3.5 * (text.length + name.length) + 12);
    axis.ticks.toSorted(([a], [b]) => (b === 0) - (a === 0)).forEach(([at, text]) => apart(at, text) && kept.set(at, text));
    Object.assign(options, { ticks: [...kept.keys()], tickFormat: (value) => kept.get(value) ?? "" });
  }
  return options;
};

const drawMark = (mark, spec, place, size) => {
  const stroke = ink(mark.color);
  const rows = points(mark);
  const title = (row) => [row.label || mark.name, `${spec.x.label || ""} ${formatted(spec.x, row.x)}`, `${spec.y.label || ""} ${formatted(spec.y, row.y)}`, row.value === undefined ? "" : `${mark.name} ${formatted(spec.y, row.value)}`].map((text) => text.trim()).filter(Boolean).join("\n");
  if (mark.kind === "line") {
    const width = mark.color === -1 ? 1 : 1.8;
    const band = rows.some((row) => finite(row.low)) ? [Plot.areaY(rows, { x: "x", y1: "low", y2: "high", fill: stroke, fillOpacity: 0.16 })] : [];
    const single = rows.filter((row) => finite(row.y)).length < 25 && mark.color !== -1 ? [Plot.dot(rows.filter((row) => finite(row.y)), { x: "x", y: "y", r: 2.2, fill: stroke })] : [];
    return [...band, Plot.line(rows, { x: "x", y: "y", stroke, strokeWidth: width, strokeDasharray: mark.dashed ? "2 3" : null }), ...single];
  }
  if (mark.kind === "stairs") {
    const steps = mark.x.map((x, at) => ({ x, y: mark.y[Math.min(at, mark.y.length - 1)] }));
    const floor = spec.y.limits[0];
    return [Plot.areaY(steps, { x: "x", y1: floor, y2: "y", fill: stroke, fillOpacity: 0.18, curve: "step-after" }), Plot.line(steps, { x: "x", y: "y", stroke, strokeWidth: 1.3, curve: "step-after" })];
  }
  if (mark.kind === "hexagons") {
    const r = 0.51 * mark.shift * size.inner;
    return [Plot.dot(rows, { x: "x", y: "y", symbol: "hexagon", r, fill: "var(--s0)", fillOpacity: "value", stroke: "none", title, tip: true }), Plot.line([[0, 0], [1, 1]], { stroke: "var(--muted)", strokeDasharray: "4 3" })];
  }
  const shown = rows.filter((row) => row.x !== null && row.y !== null);
  const dy = mark.shift ?? 0;
  const listed = mark.hollow && mark.labels.length; // small points with a name in the tooltip only
  const small = mark.color === -1 || listed;
  const bar = { stroke, strokeOpacity: 0.5, strokeWidth: 1.6, dy };
  const bars = shown.filter((row) => finite(row.low) && finite(row.high) && row.high > row.low);
  return [
    mark.across ? Plot.link(bars, { x1: "low", x2: "high", y1: "y", y2: "y", ...bar }) : Plot.ruleX(bars, { x: "x", y1: "low", y2: "high", ...bar }),
    Plot.dot(shown, { x: "x", y: "y", r: small ? 2.5 : 4.5, fill: mark.hollow ? "var(--surface)" : stroke, stroke, strokeWidth: 1.4, dy, title, tip: true }),
    Plot.text(listed ? [] : shown.filter((row) => row.label), { x: "x", y: "y", text: "label", dx: 8, textAnchor: "start", className: "point-label", fill: "var(--ink)", stroke: "var(--surface)", strokeWidth: 3 }),
  ];
};
const drawRules = (spec, [x, y], marks, width) => {
  const [found, above] = [[], []];
  const onsets = spec.rules.filter((rule) => rule.axis === "x" && rule.style === "mark" && drawn(rule.run) && rule.at >= x[0] && rule.at <= x[1]);
  const apart = onsets.length > 3;
  for (const rule of spec.rules) {
    if (!drawn(rule.run)) continue;
    const color = rule.style === "usual" ? ink(rule.color) : (rule.color ?? -1) === -1 ? "var(--muted)" : ink(rule.color);
    if (rule.style === "usual") {
      const [low, high] = [Math.max(rule.interval[0], y[0]), Math.min(rule.interval[1], y[1])];
      if (!(low < high)) continue;
      found.push(Plot.rect([0], { x1: x[0], x2: x[1], y1: low, y2: high, fill: color, fillOpacity: 0.07 }));
      found.push(Plot.text([rule.text], { x: x[1], y: low, dy: -7, dx: -4, textAnchor: "end", fill: "var(--muted)", stroke: "var(--surface)", strokeWidth: 3, fontSize: 11 }));
    } else if (rule.axis === "y") {
      found.push(Plot.ruleY([rule.at], { stroke: "var(--muted)", strokeDasharray: "2 3" }));
    } else if (apart && rule.run !== undefined) {
      const mark = marks.find((one) => one.run === rule.run);
      const at = mark ? mark.x.indexOf(rule.at) : -1;
      if (at < 0) continue;
      above.push(Plot.ruleY([mark.y[at]], { x1: rule.interval?.[0] ?? rule.at, x2: rule.interval?.[1] ?? rule.at, stroke: color, strokeWidth: 5, strokeOpacity: 0.45 }));
      above.push(Plot.dot([[rule.at, mark.y[at]]], { symbol: "diamond", r: 6, fill: color, stroke: "var(--surface)", strokeWidth: 1.5 }));
    } else {
      const solid = rule.style === "limit" ? "2 3" : "5 3";
      if (rule.interval && rule.interval[1] > rule.interval[0]) found.push(Plot.rect([0], { x1: Math.max(rule.interval[0], x[0]), x2: Math.min(rule.interval[1], x[1]), y1: y[0], y2: y[1], fill: color, fillOpacity: 0.13 }));
      found.push(Plot.ruleX([rule.at], { stroke: color, strokeDasharray: solid }));
      const texts = spec.rules.filter((other) => other.axis === "x" && other.text && drawn(other.run));
      const place = (value) => (spec.x.scale === "log" ? Math.log(value) : value);
      const share = (place(rule.at) - place(x[0])) / (place(x[1]) - place(x[0]));
      const late = share > 0.5;
      const most = Math.floor((width * (late ? share : 1 - share)) / 6.2); // characters between the line and the edge
      const text = rule.text?.length > most ? rule.text.slice(0, most - 1).trim() + "…" : rule.text;
      if (rule.text) found.push(Plot.text([text], { x: rule.at, frameAnchor: "top", dy: 2 + 14 * texts.indexOf(rule), dx: late ? -5 : 5, textAnchor: late ? "end" : "start", fill: "var(--ink)", stroke: "var(--surface)", strokeWidth: 4, fontSize: 11.5, className: "rule-label" }));
    }
  }
  return [found, above];
};
// Labels at the ends of lines, without overlap.
const endLabels = (marks, y, height) => {
  const rows = marks.filter((mark) => mark.color !== -1 && mark.name).map((mark) => {
    const last = mark.y.findLastIndex(finite);
    return last < 0 ? null : { name: mark.name, color: ink(mark.color), x: mark.x[last], y: mark.y[last] };
  }).filter(Boolean).sort((a, b) => b.y - a.y);
  if (rows.length > 10) return [];
  const place = d3.scaleLog(y, [height, 0]);
  let above = -Infinity;
  return rows.map((row) => {
    const at = Math.max(place(row.y), above + 13);
    above = at;
    return Plot.text([row], { x: "x", y: "y", text: "name", dx: 6, dy: at - place(row.y), textAnchor: "start", fill: row.color, fontWeight: 600 });
  });
};
// Move a point label that overlaps another label, or if possible a point, to another side, or remove it. The tooltip shows the name.
const placeLabels = (svg) => {
  if (!svg.querySelector(".point-label")) return;
  const frame = svg.getBoundingClientRect();
  const boxes = (selector) => all(selector, svg).map((one) => one.getBoundingClientRect());
  const [taken, dots] = [boxes("text.rule-label, .rule-label text, [data-mark$='tick label'] text"), boxes("circle")];
  for (const text of all(".point-label text", svg).reverse()) {
    const fits = (others) => [[0, 0, "start"], [-16, 0, "end"], [-8, -13, "middle"], [-8, 13, "middle"], [0, -13, "start"], [0, 13, "start"]].some(([x, y, anchor]) => {
      text.setAttribute("x", x);
      text.setAttribute("y", y);
      text.setAttribute("text-anchor", anchor);
      const box = text.getBoundingClientRect();
      if (box.left < frame.left || box.right > frame.right || box.top < frame.top) return false;
      return !others.some((other) => box.left < other.right + 2 && box.right > other.left - 2 && box.top < other.bottom - 2 && box.bottom > other.top + 2) && taken.push(box);
    });
    if (!fits([...taken, ...dots]) && !fits(taken)) text.remove();
  }
};
const legend = (marks) => {
  const named = marks.filter((mark) => mark.name && mark.kind !== "hexagons");
  if (named.length < 2) return "";
  const item = (mark) => {
    const swatch = make("i", { className: `swatch ${mark.kind}${mark.hollow ? " hollow" : ""}${mark.dashed ? " dashed" : ""}` });
    swatch.style.setProperty("--color", ink(mark.color));
    return make("span", {}, swatch, mark.name);
  };
  return make("p", { className: "legend" }, ...named.map(item));
};

const figures = new Map();
// Read all widths first and place all labels last, so that the browser lays out the page only twice.
const draw = (...list) => {
  const visible = list.filter((figure) => figure.checkVisibility());
  visible.filter((figure) => !figure.querySelector(".canvas")).forEach(fill);
  const widths = visible.map((figure) => Math.floor(figure.querySelector(".canvas").clientWidth));
  visible.forEach((figure, place) => drawFigure(figure, widths[place]));
  visible.forEach((figure) => placeLabels(figures.get(figure).plot));
};
const drawFigure = (figure, width) => {
  const canvas = figure.querySelector(".canvas");
  const spec = page.figures[figure.dataset.figure];
  const wide = spec.size === "wide";
  const marks = spec.marks.filter((mark) => drawn(mark.run));
  const band = (key) => (spec[key].scale === "band" ? [...new Set(marks.flatMap((mark) => mark[key]))] : null);
  const domains = ["x", "y"].map((key) => band(key) ?? extent(spec, key, marks));
  const long = (names) => Math.min(Math.max(...names.map((name) => name.length), 4) * 7.2 + 14, 300, width * 0.45);
  const ends = wide && marks.length > 1 && marks.every((mark) => mark.kind === "line" && mark.run !== undefined);
  const labels = ends ? marks.filter((mark) => mark.color !== -1).map((mark) => mark.name) : [];
  const few = labels.length <= 10 && width > 560;
  const low = Number(figure.dataset.height) || (wide ? 330 : 250);
  const left = band("y") ? long(domains[1]) : spec.x.named ? 66 : 60;
  const ticks = spec.x.named ? Math.max(...spec.x.ticks.map(([, text]) => text.length)) * 4.4 : 20;
  const right = ends && few && labels.length ? long(labels) : Math.max(20, ticks);
  const inner = width - left - right;
  const square = spec.size === "square";
  const lines = Math.max(...(band("y") ?? []).map((name) => inLines(name, charactersIn(left)).split("\n").length));
  const height = band("y") ? (spec.y.label ? 64 : 50) + Math.max(domains[1].length * Math.max(marks.some((mark) => mark.shift) ? 26 : 22, 12 * lines + 8), 60) : square ? Math.min(inner, 340) + 60 : low;
  const size = { inner: square ? Math.min(inner, 340) : inner };
  const named = spec.marks.slice(0, 8).map((mark) => mark.name).filter(Boolean).join(", ");
  const [below, above] = drawRules(spec, domains, marks, inner);
  const plot = Plot.plot({
    width: square ? left + right + size.inner : width, height, marginLeft: left, marginRight: right, marginTop: spec.y.label ? 26 : 12, marginBottom: 38,
    style: { background: "none", color: "var(--ink)", fontFamily: "var(--sans)", fontSize: "12px", overflow: "visible" },
    x: { ...scale(spec.x, domains[0], wide, size.inner), labelAnchor: "center" }, y: { ...scale(spec.y, domains[1], false, band("y") ? left : height), labelAnchor: "top" },
    opacity: { type: marks[0]?.kind === "hexagons" ? "log" : "linear", range: [0.12, 0.85] },
    ariaLabel: `${spec.title}: ${[spec.y.label, spec.x.label].filter(Boolean).join(" by ")}${named ? ` for ${named}` : ""}.`,
    marks: [
      ...below, ...marks.filter((mark) => mark.color === -1).flatMap((mark) => drawMark(mark, spec, 0, size)),
      ...marks.filter((mark) => mark.color !== -1).flatMap((mark, place) => drawMark(mark, spec, place, size)),
      ...above, ...(ends && few ? endLabels(marks, domains[1], height - 64) : []),
    ],
  });
  plot.setAttribute("role", "img");
  for (const part of all("[aria-label]", plot)) { // screen readers read the label of the figure only
    part.dataset.mark = part.getAttribute("aria-label");
    part.removeAttribute("aria-label");
  }
  canvas.replaceChildren(plot, ends && few ? "" : legend(marks));
  figures.set(figure, { spec, plot, marks, width, height });
  if (spec.x.label === "step") watchSteps(figure);
};

// Mark the step under the pointer or the arrow keys in all figures over steps.
const stepsOf = ({ marks }) => [...new Set(marks.flatMap((mark) => mark.x))].sort((a, b) => a - b);
const nearest = (steps, step) => steps.reduce((best, other) => (Math.abs(other - step) < Math.abs(best - step) ? other : best), steps[0]);
const clearCursor = () => {
  all(".cursor").forEach((line) => line.remove());
  all("figure .readout").forEach((readout) => (readout.textContent = ""));
};
const showStep = (step, source) => {
  clearCursor();
  for (const [figure, state] of figures) {
    if (state.spec.x.label !== "step" || !state.plot.isConnected || !figure.clientWidth || !state.marks.length) continue;
    const here = nearest(stepsOf(state), step);
    const x = state.plot.scale("x").apply(here);
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    for (const [key, value] of Object.entries({ class: "cursor", x1: x, x2: x, y1: 26, y2: state.height - 38 })) line.setAttribute(key, value);
    state.plot.append(line);
    const values = state.marks.map((mark) => [mark.name, mark.y[mark.x.indexOf(here)]]).filter(([, value]) => finite(value)).sort((a, b) => b[1] - a[1]);
    const label = new Map(state.spec.x.ticks ?? []).get(here) ?? here;
    const unit = /\((.*)\)$/.exec(state.spec.y.label)?.[1] ?? "";
    figure.querySelector(".readout").textContent = `step ${label}: ` + values.slice(0, 6).map(([name, value]) => `${name} ${formatted(state.spec.y, value)}`).join(", ") + (unit ? ` ${unit}` : "");
  }
};
const watchSteps = (figure) => {
  const state = figures.get(figure);
  const svg = state.plot;
  let here = null;
  svg.tabIndex = 0;
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    here = nearest(stepsOf(state), svg.scale("x").invert(((event.clientX - box.left) / box.width) * state.width));
    showStep(here);
  });
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const steps = stepsOf(state);
    if (!by || !steps.length) return;
    event.preventDefault();
    const place = here === null ? (by > 0 ? -1 : steps.length) : steps.indexOf(here);
    here = steps[Math.min(Math.max(place + by, 0), steps.length - 1)];
    showStep(here);
  });
  for (const kind of ["pointerleave", "blur"]) svg.addEventListener(kind, clearCursor);
};

// Table and CSV of a figure, with one row per point.
const tableOf = (spec) => {
  const names = spec.x.named ? new Map(spec.x.ticks) : new Map();
  const heads = ["series", "name", spec.x.label || "x", spec.y.label || "y", "from", "to", "value"];
  const unlike = spec.x.ticks && !spec.x.scale && !spec.x.named; // places on the axis differ from the values
  const place = (row) => (unlike ? ["", row.label] : [row.label, names.get(row.x) ?? row.x]);
  const rows = spec.marks.flatMap((mark) => points(mark).map((row) => [spec.marks.length > 1 ? mark.name : "", ...place(row), row.y, row.low, row.high, row.value].map((cell) => cell ?? "")));
  const used = heads.map((_, place) => place).filter((place) => rows.some((row) => row[place] !== ""));
  return [heads, ...rows].map((row) => used.map((place) => row[place]));
};
const safeCell = (cell) => {
  const text = typeof cell === "string" && /^[=+\-@\t\r]/.test(cell) ? "'" + cell : String(cell);
  return /[",\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
};
const save = (name, rows) => {
  const link = make("a", { href: URL.createObjectURL(new Blob(rows.map((row) => row.map(safeCell).join(",") + "\n"), { type: "text/csv" })), download: name + ".csv" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
};
// Keep a number such as 1e-4 in one line.
const inWholeNumbers = (text) => text.split(/([-+]?[\d.]+e-\d+)/).map((part, at) => (at % 2 ? make("span", { className: "whole", textContent: part }) : part));
const fill = (figure) => {
  const spec = page.figures[figure.dataset.figure];
  figure.append(make("p", { className: "title", }, ...inWholeNumbers(spec.title)), ...(spec.x.label === "step" ? [make("p", { className: "readout", ariaLive: "polite" })] : []), make("div", { className: "canvas" }));
  resized.observe(figure.querySelector(".canvas"));
  if (page.captions[spec.caption]) figure.append(make("figcaption", { textContent: page.captions[spec.caption] }));
  const details = make("details", { className: "numbers" }, make("summary", { textContent: "Numbers" }));
  details.addEventListener("toggle", () => {
    if (!details.open || details.querySelector("table")) return;
    const [heads, ...rows] = tableOf(spec);
    const table = make("table", {}, make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { textContent: text, scope: "col" })))), make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", { textContent: cell }))))));
    const scroll = make("div", { className: "scroll", tabIndex: 0, role: "group", ariaLabel: `Numbers: ${spec.title}` }, table);
    const button = make("button", { type: "button", textContent: "Save as CSV", onclick: () => save(spec.name, [heads, ...rows]) });
    details.append(button, scroll);
  });
  figure.append(details);
};
const waiting = new Set();
const drawSoon = (list) => {
  if (!waiting.size && list.length) requestAnimationFrame(() => {
    draw(...waiting);
    waiting.clear();
  });
  list.forEach((figure) => waiting.add(figure));
};
document.addEventListener("toggle", ({ target }) => target.open && drawSoon(all("figure[data-figure]", target).filter((figure) => !figures.has(figure))), true);
const resized = new ResizeObserver((entries) => drawSoon(entries
  .filter(({ target, contentRect }) => contentRect.width && Math.abs(contentRect.width - (figures.get(target.parentElement)?.width ?? 0)) > 2)
  .map(({ target }) => target.parentElement)));
draw(...all("figure[data-figure]"));

// Sort tables by a column.
const sortTable = (table, head, column) => {
  const body = table.tBodies[0];
  const text = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent.trim();
  const down = head.getAttribute("aria-sort") !== "descending";
  all("th", table.tHead).forEach((other) => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const known = (value) => value !== "" && !Number.isNaN(Number(value));
  [...body.rows].sort((a, b) => {
    const [x, y] = [text(a), text(b)];
    if (known(x) && known(y)) return (down ? -1 : 1) * (Number(x) - Number(y));
    if (known(x) !== known(y)) return known(x) ? -1 : 1;
    return (down ? -1 : 1) * x.localeCompare(y, undefined, { numeric: true });
  }).forEach((row) => body.append(row));
};
for (const table of all("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.append(make("button", { type: "button", className: "sort", ariaLabel: "Sort by " + head.textContent.trim(), onclick: () => sortTable(table, head, column) }));
  });
}

// Filter and pin runs.
const sidebar = document.querySelector(".sidebar .runs");
if (sidebar) {
  const apply = () => {
    all("[data-run]").forEach((element) => (element.hidden = !matches(Number(element.dataset.run))));
    all(".run-link").sort((a, b) => runs.pinned.has(Number(b.dataset.run)) - runs.pinned.has(Number(a.dataset.run)) || a.dataset.order - b.dataset.order).forEach((link) => sidebar.append(link));
    draw(...all("figure[data-runs]"));
  };
  const filter = make("input", { type: "search", placeholder: "Filter runs", ariaLabel: "Filter runs", oninput: () => { runs.text = filter.value; apply(); } });
  sidebar.before(filter);
  all(".run-link").forEach((link, order) => {
    link.dataset.order = order;
    const run = Number(link.dataset.run);
    const pin = make("button", { type: "button", className: "pin", textContent: "☆", ariaLabel: "Pin " + link.dataset.name, ariaPressed: "false" });
    pin.addEventListener("click", () => {
      runs.pinned[runs.pinned.has(run) ? "delete" : "add"](run);
      pin.ariaPressed = String(runs.pinned.has(run));
      pin.textContent = runs.pinned.has(run) ? "★" : "☆";
      apply();
    });
    link.append(pin);
  });
  for (const figure of all("figure[data-runs]")) {
    const choice = ([mode, text]) => make("label", {}, make("input", { type: "radio", name: "mode", value: mode, checked: mode === "all", onchange: () => { runs.mode = mode; draw(figure); } }), text);
    figure.prepend(make("div", { className: "modes", role: "group", ariaLabel: "Runs in the figure" }, ...[["all", "all"], ["bad", "need attention"], ["pinned", "pinned"]].map(choice)));
  }
}

// Links open the section of their target. Commands have a copy button.
const reveal = () => {
  const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let part = target && target.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
  if (target) target.scrollIntoView();
};
addEventListener("hashchange", reveal);
reveal();
for (const code of all("code.command, pre.copy")) {
  const button = make("button", { type: "button", className: "copy-button", textContent: "copy", ariaLabel: "Copy: " + code.textContent.trim().slice(0, 80) });
  button.addEventListener("click", async () => {
    const done = await navigator.clipboard.writeText(code.textContent.trim()).then(() => true, () => {
      getSelection().selectAllChildren(code);
      return document.execCommand("copy");
    });
    button.textContent = done ? "copied" : "selected";
    setTimeout(() => (button.textContent = "copy"), 1500);
  });
  code.after(button);
}

// Show the glossary entry on hover and on focus of a link to it. Escape closes it.
{
  const tip = make("dl", { className: "tip", id: "tip", hidden: true, role: "tooltip" });
  document.body.append(tip);
  const close = () => (tip.hidden = true);
  const open = (event) => {
    if (event.target.closest?.(".tip")) return; // the tooltip stays open under the pointer
    const link = event.target.closest?.('a[href^="#m-"], a[href^="#c-"]');
    const entry = link && document.getElementById(link.hash.slice(1));
    if (!entry) return close();
    tip.replaceChildren(...[...entry.children].map((part) => part.cloneNode(true)));
    tip.hidden = false;
    const box = link.getBoundingClientRect();
    tip.style.left = Math.max(Math.min(box.left, root.clientWidth - tip.offsetWidth - 12), 8) + scrollX + "px";
    const below = box.bottom + tip.offsetHeight + 8 < innerHeight;
    tip.style.top = (below ? box.bottom : Math.max(box.top - tip.offsetHeight, 4)) + scrollY + "px";
    link.setAttribute("aria-describedby", "tip");
  };
  for (const kind of ["mouseover", "focusin"]) document.addEventListener(kind, open);
  document.addEventListener("focusout", close);
  document.addEventListener("keydown", (event) => event.key === "Escape" && close());
}
