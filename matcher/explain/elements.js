"use strict";
const byId = id => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
const make = (tag, text, parent) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
};
// A value is a text, a number, or a link: { text, link }.
function table(title, header, rows, parent = byId("tables"), kind = "") {
  make("h2", title, parent);
  const body = make("table", undefined, parent), first = make("tr", undefined, body);
  body.className = kind;
  header.forEach(text => make("th", text, first));
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
