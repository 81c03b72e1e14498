"use strict";
// Each table gets a filter and heads that sort. Without this script the page is whole, only still.
for (const sheet of document.querySelectorAll(".sheet")) {
  const table = sheet.querySelector("table");
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const heads = Array.from(table.tHead.rows[0].cells);

  const tools = document.createElement("div");
  tools.className = "tools";
  const filter = document.createElement("input");
  filter.type = "search";
  filter.placeholder = "filter: words, -without";
  filter.setAttribute("aria-label", "filter the table " + sheet.dataset.name);
  const count = document.createElement("output");
  tools.append(filter, count);
  if (rows.length > 1) sheet.prepend(tools);

  const texts = rows.map((row) => Array.from(row.cells, (cell) => cell.textContent).join(" ").toLowerCase());
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, at) => {
      const keep = words.every((word) =>
        word.length > 1 && word[0] === "-" ? !texts[at].includes(word.slice(1)) : texts[at].includes(word));
      row.hidden = !keep;
      shown += keep;
    });
    count.textContent = words.length ? shown + " of " + rows.length + " rows" : "";
  });

  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => {
        const cell = row.cells[column];
        return "v" in cell.dataset ? Number(cell.dataset.v) : null;
      };
      const sorted = rows.slice().sort((a, b) => {
        const x = key(a), y = key(b);
        // What is no number comes last, whichever way.
        if (x !== null && y !== null) return down ? y - x : x - y;
        if (x !== null || y !== null) return x === null ? 1 : -1;
        const order = a.cells[column].textContent.localeCompare(b.cells[column].textContent, "en", { numeric: true });
        return down ? -order : order;
      });
      body.append(...sorted);
    });
  });
}
