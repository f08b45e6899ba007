// Tables, filled with text only: nothing that comes from the server can become markup.

export function fillTable(table, columns, rows) {
  const head = document.createElement("thead");
  head.append(makeRow("th", columns));
  for (const cell of head.querySelectorAll("th")) cell.scope = "col";
  const body = document.createElement("tbody");
  for (const row of rows) body.append(makeRow("td", row));
  table.replaceChildren(head, body);
}

function makeRow(kind, cells) {
  const row = document.createElement("tr");
  for (const content of cells) {
    const cell = document.createElement(kind);
    cell.append(content);
    row.append(cell);
  }
  return row;
}

export function meter(value, most, label) {
  const found = document.createElement("meter");
  found.max = Math.max(most, 1);
  found.value = value;
  found.setAttribute("aria-label", label);
  return found;
}
