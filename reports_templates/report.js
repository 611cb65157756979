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
    const unit = head.querySelector("small");
    head.insertBefore(document.createTextNode("\u2060"), unit); // no line break before the button
    head.insertBefore(button, unit);
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
let folded = [];
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open], .numbers)")];
  folded.forEach((part) => (part.open = true));
});
addEventListener("afterprint", () => folded.forEach((part) => (part.open = false)));
