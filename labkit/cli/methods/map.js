"use strict";
// Filters the map by the selected compression and scheduling: the grids, the list of cells and the list of
// empty cells. Without a selection the page is unchanged.
(() => {
  const EMPTY = "—", NONE = "no method here";
  const { columns, places, standings } = JSON.parse(document.getElementById("standings").textContent);
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const menus = all("select[data-axis]"), status = document.querySelector(".count");
  const chosen = ([compression, scheduling]) => menus.every(({ dataset, value }) =>
    !value || value === { compression, scheduling }[dataset.axis]);

  // Returns the visible methods of each cell, with their texts.
  function seen() {
    const cells = places.map(() => new Map());
    for (const { method, place, said, at } of standings) if (at.some(chosen)) cells[place].set(method, said);
    return cells;
  }

  const inRows = (values) => values.reduce((rows, value, at) => {
    if (at % columns.length === 0) rows.push([]);
    rows.at(-1).push(value);
    return rows;
  }, []);

  function draw(node, cells) {
    const isNumbers = node.closest(".numbers");
    const text = cells.map((here) => (here.size ? (isNumbers ? String(here.size) : [...here.keys()].join("<br>")) : EMPTY));
    const hover = cells.map((here, at) => [`<b>${places[at].title}</b>`, ...(here.size ? here.values() : [NONE])].join("<br>"));
    Plotly.restyle(node, { z: [inRows(cells.map(({ size }) => size))], customdata: [inRows(hover)] }, [0]);
    Plotly.restyle(node, { text: [text] }, [1]);
  }

  function listed(cells) {
    for (const section of all("[data-place]")) {
      const here = cells[section.dataset.place];
      for (const item of all("[data-method]", section)) item.hidden = !here.has(item.dataset.method);
      section.hidden = !here.size;
    }
    const filled = cells.filter(({ size }) => size).length;
    const names = new Set(cells.flatMap((here) => [...here.keys()]));
    status.textContent = `${names.size} ${names.size === 1 ? "method" : "methods"} in ${filled} of ${cells.length} cells`;
  }

  function bare(cells) {
    const list = document.getElementById("bare"), rows = new Map();
    cells.forEach(({ size }, at) => {
      const { row, column } = places[at];
      if (!size) rows.set(row, [...(rows.get(row) || []), column]);
    });
    list.replaceChildren(...[...rows].map(([row, empty]) => {
      const item = document.createElement("li");
      item.textContent = `${row}: ${empty.length === columns.length ? "none at all" : empty.join(", ")}`;
      return item;
    }));
  }

  function choose() {
    const cells = seen();
    listed(cells);
    bare(cells);
    for (const node of all(".plot")) if (node.data) draw(node, cells);
  }

  function go({ points: [{ pointNumber }] }) {
    const [row, column] = pointNumber, cell = document.querySelector(`[data-place="${row * columns.length + column}"]`);
    const target = cell && !cell.hidden ? cell : document.getElementById("empty");
    target.scrollIntoView({ block: "center" });
    target.focus({ preventScroll: true });
  }

  // Plotly draws a grid when it scrolls near the screen, possibly after a selection.
  function ready(node) {
    if (!node.on) return false;
    node.on("plotly_click", go);
    if (menus.some(({ value }) => value)) draw(node, seen());
    return true;
  }

  for (const node of all(".plot")) {
    if (ready(node)) continue;
    const watch = new MutationObserver(() => { if (ready(node)) watch.disconnect(); });
    watch.observe(node, { childList: true });
  }
  for (const menu of menus) menu.addEventListener("change", choose);
})();
