"use strict";
const byId = id => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
const make = (tag, text, parent) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
};
// A value is a text, a number, or a link: { text, link }. A click on the head of a column sorts by it.
function table(title, header, rows, parent = byId("tables"), kind = "") {
  make("h2", title, parent);
  const body = make("table", undefined, parent), first = make("tr", undefined, body);
  body.className = kind;
  header.forEach((text, column) => make("th", text, first).addEventListener("click", event => {
    const lines = [...body.rows].slice(1), text = line => line.cells[column].textContent;
    const falling = event.target.dataset.order === "rising", ordered = new Intl.Collator(undefined, { numeric: true });
    lines.sort((a, b) => text(a) - text(b) || ordered.compare(text(a), text(b)));
    event.target.dataset.order = falling ? "falling" : "rising";
    body.append(...(falling ? lines.reverse() : lines));
  }));
  for (const row of rows) {
    const line = make("tr", undefined, body);
    for (const value of row) {
      const cell = make("td", undefined, line);
      if (value !== null && typeof value === "object") make("a", value.text, cell).href = value.link;
      else cell.textContent = value;
    }
  }
  return body;
}
