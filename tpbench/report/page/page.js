"use strict";
// Tables get a filter, heads that sort, and labels for phones, when they are opened. Without this script the page is whole, only still.
const NUMBER = /^[<+-]?(\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?:$|[ %x(*^≠†‡§¶])/;

function cellNumber(cell) {
  if ("v" in cell.dataset) return Number(cell.dataset.v);
  const found = NUMBER.exec(cell.textContent);
  return found ? Number(found[1]) : null;
}

function addTools(sheet) {
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
      const keyed = rows.map((row) => [row, cellNumber(row.cells[column]), row.cells[column].textContent]);
      keyed.sort(([, x, one], [, y, other]) => {
        // What is no number comes last, whichever way.
        if (x !== null && y !== null) return down ? y - x : x - y;
        if (x !== null || y !== null) return x === null ? 1 : -1;
        const order = one.localeCompare(other, "en", { numeric: true });
        return down ? -order : order;
      });
      body.append(...keyed.map(([row]) => row));
    });
  });
}

// On a phone, each row of a table with keys becomes a block: its keys, then a line for each value that exists.
function labelCells(sheet) {
  const keys = Number(sheet.dataset.keys);
  if (!keys) return;
  const [head, ...rows] = sheet.querySelector("table").rows;
  for (const row of rows)
    for (const cell of row.cells) {
      if (cell.textContent !== "-") cell.dataset.label = head.cells[cell.cellIndex].textContent;
      cell.classList.toggle("key-cell", cell.cellIndex < keys);
    }
}

function openSheet(sheet) {
  if (sheet.dataset.open) return;
  sheet.dataset.open = "1";
  addTools(sheet);
  labelCells(sheet);
}

function openVisible() {
  for (const sheet of document.querySelectorAll(".sheet:not([data-open])"))
    if (!sheet.closest("details:not([open])")) openSheet(sheet);
}

document.addEventListener("toggle", openVisible, true);
// A link to a folded section, or to a row inside it, opens it. A click on a row's cell makes its link.
function openTarget() {
  const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let part = target; part; part = part.parentElement) if (part instanceof HTMLDetailsElement) part.open = true;
  if (target) target.scrollIntoView({ block: target.tagName === "TD" ? "center" : "start" });
}
document.addEventListener("click", (event) => {
  const cell = event.target.closest("td[id]");
  if (cell) location.hash = cell.id;
});
window.addEventListener("hashchange", openTarget);
openTarget();
openVisible();
