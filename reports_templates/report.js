// Comfort only; the page is complete without it: tables sort by a column, folded parts print.
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const text = (row, column) => row.cells[column].dataset.v ?? row.cells[column].textContent.trim();
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sort";
    button.setAttribute("aria-label", "Sort by " + head.textContent.trim());
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const sign = down ? -1 : 1;
      const known = (value) => value !== "" && !Number.isNaN(Number(value));
      [...body.rows]
        .sort((a, b) => {
          const [x, y] = [text(a, column), text(b, column)];
          if (known(x) && known(y)) return sign * (Number(x) - Number(y));
          if (known(x) !== known(y)) return known(x) ? -1 : 1;
          return sign * x.localeCompare(y, undefined, { numeric: true });
        })
        .forEach((row) => body.append(row));
    });
    head.append(button);
  });
}
for (const table of document.querySelectorAll("table[data-csv]")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "CSV";
  button.setAttribute("aria-label", "Save these numbers as CSV: " + table.dataset.csv);
  button.addEventListener("click", () => {
    const cell = ({ textContent: text }) => (/[",\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text);
    const lines = [...table.rows].map((row) => [...row.cells].map(cell).join(",") + "\n");
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob(lines, { type: "text/csv" }));
    link.download = table.dataset.csv + ".csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  table.closest("details").querySelector("summary").after(button);
}
// One cursor over all figures of steps: the step under the pointer, or that the arrow keys lead to, is marked in each.
const overSteps = [...document.querySelectorAll("figure[data-steps]")].map((figure) => {
  const svg = figure.querySelector("svg");
  const [left, top, right, bottom, low, high] = figure.dataset.steps.split(" ").map(Number);
  const rows = [...figure.querySelectorAll(".numbers tr")].map((row) => [...row.cells].map((cell) => cell.textContent));
  const heads = rows.shift() ?? [];
  const numeric = rows.every((row) => row[0] !== "" && !Number.isNaN(Number(row[0])));
  const steps = rows.map((row, index) => (numeric ? Number(row[0]) : index));
  const said = figure.querySelector(".subject");
  const place = (step) => left + ((step - low) / (high - low)) * (right - left);
  return { svg, said, was: said.textContent, heads, rows, steps, place, top, bottom, at: (x) => low + ((x - left) / (right - left)) * (high - low) };
});
const clearSteps = () => {
  for (const { svg, said, was } of overSteps) {
    svg.querySelector(".cursor")?.remove();
    said.textContent = was;
  }
};
const nearest = (steps, step) => steps.reduce((best, other, index) => (Math.abs(other - step) < Math.abs(steps[best] - step) ? index : best), 0);
const tellStep = (step) => {
  clearSteps();
  for (const { svg, said, heads, rows, steps, place, top, bottom } of overSteps) {
    if (!steps.length) continue;
    const near = nearest(steps, step);
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    const x = place(steps[near]);
    for (const [key, value] of Object.entries({ class: "cursor", x1: x, x2: x, y1: top, y2: bottom })) line.setAttribute(key, value);
    svg.append(line);
    const told = rows[near].slice(1).map((text, index) => [heads[index + 1], text]).filter(([head, text]) => text !== "" && !/ (from|to)$/.test(head));
    said.textContent = "step " + rows[near][0] + ": " + told.map(([head, text]) => head.replace(/ \(.*\)$/, "") + " " + (Number.isNaN(Number(text)) ? text : Number(Number(text).toPrecision(4)))).join(", ");
  }
};
for (const here of overSteps) {
  let index = -1;
  here.svg.tabIndex = 0;
  here.said.setAttribute("aria-live", "polite");
  here.svg.addEventListener("pointermove", (event) => {
    const box = here.svg.getBoundingClientRect();
    const step = here.at(((event.clientX - box.left) / box.width) * here.svg.viewBox.baseVal.width);
    tellStep(step);
    index = nearest(here.steps, step);
  });
  here.svg.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !here.steps.length) return;
    event.preventDefault();
    index = Math.min(Math.max(index + by, 0), here.steps.length - 1);
    tellStep(here.steps[index]);
  });
  for (const kind of ["pointerleave", "blur"]) here.svg.addEventListener(kind, clearSteps);
}
let folded = [];
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open], .numbers)")];
  folded.forEach((part) => (part.open = true));
});
addEventListener("afterprint", () => folded.forEach((part) => (part.open = false)));
// What a number means, beside it: the glossary's words on hover and focus of a link that leads there; Escape closes.
{
  const tip = Object.assign(document.createElement("dl"), { className: "tip", id: "tip", hidden: true });
  tip.setAttribute("role", "tooltip");
  document.body.append(tip);
  const close = () => (tip.hidden = true);
  const open = (event) => {
    if (event.target.closest?.(".tip")) return; // it may be read with the pointer over it
    const link = event.target.closest?.('a[href^="#m-"], a[href^="#c-"]');
    const entry = link && document.getElementById(link.hash.slice(1));
    if (!entry) return close();
    tip.replaceChildren(...[...entry.children].map((part) => part.cloneNode(true)));
    tip.hidden = false;
    const box = link.getBoundingClientRect();
    const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 12);
    tip.style.left = Math.max(left, 8) + scrollX + "px";
    const below = box.bottom + tip.offsetHeight + 8 < innerHeight;
    tip.style.top = (below ? box.bottom : Math.max(box.top - tip.offsetHeight, 4)) + scrollY + "px";
    link.setAttribute("aria-describedby", "tip");
  };
  for (const kind of ["mouseover", "focusin"]) document.addEventListener(kind, open);
  document.addEventListener("focusout", close);
  document.addEventListener("keydown", (event) => event.key === "Escape" && close());
}
