"use strict";
// Draws every figure of the page with Plotly. The view is a function of the original figures and of the state
// below, which the table and the controls change. A trace's meta names its runs: `run` (one), `runs` (several) or
// `points` (the runs of each point). `over` has its values on other x axes, `raw` its unsmoothed values.
(() => {
  const FAINT = 0.12, NARROW = 700, USUAL = 5; // USUAL: percent of a run over which Python averages curves
  const FACETS = 12; // greatest number of facets (plots for one parameter value each)
  const COLORS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"];
  const DASHES = ["solid", "dash", "dot", "dashdot"], BORDERS = ["solid", "dashed", "dotted", "double"];
  const root = document.documentElement;
  const find = (selector, from = document) => from.querySelector(selector);
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  // The data are `shared` values and, by key, each run's label, color and values; a gallery's index has no such data.
  const known = JSON.parse(find("#known")?.textContent ?? '{"shared": {}, "runs": {}}');
  const boxes = all("input[data-run]"), marks = all("[data-mark]"), status = find(".chosen");
  const state = { axis: "step", smooth: USUAL, by: "", facet: "", marked: "", passing: null };
  const sources = [], plots = [];
  let toFirst;
  const first = new Promise((done) => { toFirst = done; });
  let turn = 0, refacet = false, busy = Promise.resolve(), wake = () => {};

  const valueOf = (key, name) => {
    const { values } = known.runs[key];
    return Object.hasOwn(values, name) ? values[name] : known.shared[name];
  };
  const textOf = (value) => (value === null || value === undefined ? "none" : String(value));
  const valuesOf = (name) => [...new Set(Object.keys(known.runs).map((key) => textOf(valueOf(key, name))))];
  const keysOf = ({ meta = {} }) => (meta.runs || (meta.run ? [meta.run] : [])).filter((key) => key in known.runs);
  // A page with one run has no checkboxes, so its run is always chosen.
  const chosenKeys = () => (boxes.length
    ? boxes.filter((box) => box.checked).map((box) => box.dataset.run) : Object.keys(known.runs));
  const shownKeys = () => new Set(chosenKeys().filter((key) => !state.passing || state.passing.has(key)));

  // Returns the colour and dash of a run's parameter value; after six values, colours repeat with another dash.
  function lookOf(key) {
    const place = valuesOf(state.by).indexOf(textOf(valueOf(key, state.by)));
    return [COLORS[place % COLORS.length], Math.floor(place / COLORS.length) % DASHES.length];
  }

  const colorOf = (key) => (state.by ? lookOf(key)[0] : known.runs[key].color);

  // Returns the trace in another colour, and a line in another dash; transparency is kept.
  function recolored(trace, [color, dash]) {
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
    const like = (old) => {
      const alpha = typeof old === "string" && old.startsWith("rgba") && old.split(",").at(-1).slice(0, -1);
      return alpha ? `rgba(${red},${green},${blue},${alpha})` : color;
    };
    const copy = { ...trace };
    for (const part of ["line", "marker", "error_x", "error_y"]) {
      if (!copy[part] || !copy[part].color) continue;
      copy[part] = { ...copy[part], color: like(copy[part].color) };
      if (copy[part].line && copy[part].line.color) copy[part].line = { ...copy[part].line, color };
    }
    if (copy.fillcolor) copy.fillcolor = like(copy.fillcolor);
    if (copy.line) copy.line = { ...copy.line, dash: DASHES[dash] };
    return copy;
  }

  // Returns a centred moving mean, computed as in labkit's Python code; gaps stay gaps.
  function smoothed(values, percent) {
    const reach = Math.floor((values.length * percent) / 200);
    return values.map((middle, place) => {
      if (middle === null) return null;
      const near = values.slice(Math.max(0, place - reach), place + reach + 1).filter((v) => v !== null);
      return near.reduce((sum, v) => sum + v, 0) / near.length;
    });
  }

  function viewTrace(trace, shown, only) {
    const { meta = {} } = trace, keys = keysOf(trace);
    const isIn = (key) => shown.has(key) && (!only || only.has(key));
    let copy = { ...trace };
    if (meta.over && state.axis !== "step") copy.x = meta.over[state.axis] || [];
    if (meta.raw && state.smooth !== USUAL) copy.y = smoothed(meta.raw, state.smooth);
    if (keys.length) {
      if (state.by) copy = recolored(copy, lookOf(keys[0]));
      copy.visible = keys.some(isIn);
      copy.opacity = !state.marked || keys.includes(state.marked) ? 1 : FAINT;
    }
    if (meta.points) {
      const pointKeys = meta.points.map((keysOfPoint) => keysOfPoint.filter((key) => key in known.runs));
      copy.y = [...trace.y].map((y, point) => (pointKeys[point].length && !pointKeys[point].some(isIn) ? null : y));
      copy.selectedpoints = state.marked
        ? pointKeys.flatMap((keysOfPoint, point) => (keysOfPoint.includes(state.marked) ? [point] : [])) : undefined;
      if (state.by && copy.marker && Array.isArray(copy.marker.color)) {
        copy.marker = { ...copy.marker, color: pointKeys.map(([key]) => colorOf(key)) };
      }
    }
    return copy;
  }

  function view({ data, layout }, plot) {
    const shown = shownKeys(), copy = { ...layout };
    const over = layout.meta && layout.meta.over && layout.meta.over[state.axis];
    for (const axis of over ? new Set(data.filter((t) => t.meta && t.meta.over).map((t) => t.xaxis || "x")) : []) {
      const name = `xaxis${axis.slice(1)}`, usual = layout[name];
      copy[name] = { ...usual, ...over, title: { ...usual.title, ...over.title } };
    }
    if (plot.ends) copy.yaxis = { ...layout.yaxis, range: plot.ends, autorange: false };
    return [data.map((trace) => viewTrace(trace, shown, plot.only)), copy];
  }

  // Values of visible runs come first; of many values, only the first few become facets.
  function facetsOf(name) {
    const every = valuesOf(name);
    if (every.length <= FACETS) return [every, ""];
    const seen = new Set([...shownKeys()].map((key) => textOf(valueOf(key, name))));
    const values = [...seen, ...every.filter((value) => !seen.has(value))].slice(0, FACETS);
    return [values, `${FACETS} of ${every.length} values of ${name} are shown; filter the runs to see others.`];
  }

  // Creates one plot per value of the facet parameter, or one plot for all runs.
  function layOutFacets(source) {
    const holder = source.holder, first = source.plots[0];
    for (const { node } of source.plots.slice(1)) node.parentElement.remove();
    source.plots.length = 1;
    first.only = first.ends = null;
    for (const label of all(".facet", holder)) label.remove();
    if (!state.facet || !source.faceted) return;
    first.ends = first.node._fullLayout && [...first.node._fullLayout.yaxis.range];
    const [values, more] = facetsOf(state.facet);
    values.forEach((value, place) => {
      const plot = place ? { node: document.createElement("div"), ends: first.ends } : first;
      plot.only = new Set(Object.keys(known.runs).filter((key) => textOf(valueOf(key, state.facet)) === value));
      if (place) {
        const box = document.createElement("div");
        plot.node.className = "plot";
        plot.node.style.minHeight = first.node.style.minHeight;
        box.append(plot.node);
        holder.append(box);
        source.plots.push(plot);
      }
      plot.node.before(sentence("facet", `${state.facet} ${value}`));
    });
    if (more) holder.append(sentence("facet note", more));
  }

  function sentence(kind, words) {
    const part = document.createElement("p");
    part.className = kind;
    part.textContent = words;
    return part;
  }

  // Adds a note to a panel that draws none of the visible runs.
  function explain(source) {
    const { holder, content: { data } } = source, shown = shownKeys();
    find(".unseen", holder)?.remove();
    const keys = new Set(data.flatMap((trace) => [...keysOf(trace), ...((trace.meta || {}).points || []).flat()]));
    if (!keys.size || !shown.size || [...keys].some((key) => shown.has(key))) return;
    holder.append(sentence("unseen note", `This plot draws none of the visible runs. It has ${keys.size} of ` +
      `${boxes.length} runs: a selection of the runs with results. A report of fewer runs draws all of them.`));
  }

  function choose(key) {
    state.marked = key === state.marked ? "" : key;
    let name = "";
    for (const button of marks) {
      const on = button.dataset.mark === state.marked;
      button.setAttribute("aria-pressed", String(on));
      if (on) name = button.textContent.trim();
    }
    if (status) status.textContent = name && `${name} is highlighted.`;
    update();
  }

  function listen(node) {
    node.on("plotly_click", ({ points: [point] }) => {
      const { meta } = point.data;
      const key = meta && (meta.points ? meta.points[point.pointNumber][0] : meta.run);
      if (key in known.runs) choose(key);
    });
  }

  // Plotly's own buttons and sliders do not work with the keyboard, so the page replaces them.
  function replacePlotlyControls(node, layout) {
    const height = (layout.meta && layout.meta.controls) || 0;
    const { active = 0, currentvalue = {} } = (layout.sliders || [{}])[0];
    layout.meta = { ...layout.meta, start: active, prefix: currentvalue.prefix || "frame " };
    delete layout.sliders;
    delete layout.updatemenus;
    shorten(node, layout, height);
  }

  function shorten(node, layout, height) {
    if (!height) return;
    layout.height -= height;
    layout.margin.b -= height;
    node.style.minHeight = `${layout.height}px`;
  }

  // The table serves as the legend of figures about its runs, and the page has the control of the x axis.
  function hideLegend(node, data, layout) {
    const { legend = 0, over } = layout.meta || {};
    if (over && Object.keys(over).length) delete layout.updatemenus;
    const named = data.filter(({ showlegend, meta }) => showlegend && meta && meta.run);
    if (!legend || !named.every(({ meta }) => meta.run in known.runs)) return;
    layout.showlegend = false;
    shorten(node, layout, legend);
  }

  // On a phone, panels that share a canvas are stacked.
  function fitted(node, data, layout) {
    const canvas = node.closest(".figure:not(.foreign) .canvas");
    if (!canvas || innerWidth >= NARROW) return layout;
    const stacked = narrow.stacked(layout, data, canvas.parentElement.clientWidth);
    if (stacked !== layout) {
      canvas.classList.add("stacked");
      node.style.minHeight = `${stacked.height}px`;
    }
    return stacked;
  }

  async function animate(node, frames, layout) {
    await Plotly.addFrames(node, frames);
    const bar = document.createElement("div");
    bar.className = "frames";
    bar.innerHTML = '<button type="button">play</button><label><output></output>' +
      '<input type="range" min="0" step="1"></label>';
    const [button, output, range] = ["button", "output", "input"].map((n) => bar.querySelector(n));
    range.max = frames.length - 1;
    let timer = 0;
    function show(place, redraw = true) {
      range.value = place;
      output.textContent = `${layout.meta.prefix}${place} of ${frames.length - 1}`;
      const frame = { mode: "immediate", frame: { duration: 0, redraw: true }, transition: { duration: 0 } };
      if (redraw) Plotly.animate(node, [frames[place].name], frame);
    }
    function stop() {
      clearInterval(timer);
      timer = 0;
      button.textContent = "play";
    }
    button.addEventListener("click", () => {
      if (timer) return stop();
      button.textContent = "pause";
      if (Number(range.value) === frames.length - 1) show(0);
      timer = setInterval(() => {
        show(Number(range.value) + 1);
        if (Number(range.value) === frames.length - 1) stop();
      }, 1400);
    });
    range.addEventListener("input", () => { stop(); show(Number(range.value)); });
    show(layout.meta.start, false);
    node.after(bar);
  }

  function read(script) {
    const node = script.previousElementSibling;
    const source = { script, holder: script.parentElement, plots: [{ node, only: null, ends: null }] };
    source.faceted = script.parentElement.classList.contains("panel");
    return source;
  }

  async function draw(source) {
    const { node } = source.plots[0];
    try {
      const { data, layout, config, frames } = JSON.parse(source.script.textContent);
      if (frames) replacePlotlyControls(node, layout);
      delete layout.width; // The page sets the width.
      source.config = { ...config, displayModeBar: innerWidth < NARROW ? false : "hover" };
      if (!frames && Array.isArray(data)) {
        hideLegend(node, data, layout);
        source.content = { data, layout: fitted(node, data, layout) };
        source.faceted &&= data.some(({ meta }) => meta && meta.over);
      }
      const [traces, look] = source.content ? view(source.content, source.plots[0]) : [data, layout];
      node.textContent = ""; // Removes the still picture.
      const drawing = Plotly.newPlot(node, traces, look, source.config);
      plots.push(source);
      await drawing;
      if (frames) await animate(node, frames, layout);
      listen(node);
      offer(source);
      if (source.content && state.facet && source.faceted) await render(source, true);
      else if (source.content && boxes.length) explain(source);
    } catch (error) { // An invalid figure shows this message; the other figures are drawn.
      if (plots.at(-1) === source) plots.pop();
      node.textContent = "This figure cannot be drawn: " + error.message;
    }
  }

  function offer(source) {
    const panel = source.holder.closest(".panels > *"), figure = source.holder.closest("figure");
    const heads = [panel && find("h4", panel), figure.previousElementSibling?.matches("h3") && figure.previousElementSibling];
    const title = heads.find(Boolean)?.textContent || figure.getAttribute("aria-label");
    const place = find(".offers", panel || figure);
    if (place) offers.put(place, title, source, (key) => known.runs[key]?.label);
  }

  // Waits until the page has painted and handled input; a background page does not paint, hence the timeout.
  function painted() {
    const shown = new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    return Promise.race([shown, new Promise((done) => setTimeout(done, 200))]);
  }

  // Redraws all figures in sequence; a later change replaces pending redraws. Changes run one after another, because
  // facets are added and removed while another change may draw in them.
  function update(facets = false) {
    const revision = ++turn;
    refacet ||= facets || Boolean(state.facet) && valuesOf(state.facet).length > FACETS;
    delete root.dataset.settled;
    busy = busy.then(() => revision === turn && redraw(revision));
  }

  async function render(source, facets) {
    if (facets) layOutFacets(source);
    if (boxes.length) explain(source);
    for (const plot of source.plots) {
      const isNew = !plot.node._fullLayout;
      await Plotly.react(plot.node, ...view(source.content, plot), source.config);
      if (isNew) listen(plot.node);
    }
  }

  async function redraw(revision) {
    const facets = refacet;
    refacet = false;
    for (const source of plots) {
      if (!source.content) continue;
      await render(source, facets);
      await painted();
      if (revision !== turn && !facets) return;
    }
    if (revision === turn) root.dataset.settled = String(turn);
  }

  // Draws the first figure, then each figure near the viewport; the others show still pictures.
  async function drawSeen() {
    const near = new Set(sources.slice(0, 1).map(({ plots: [{ node }] }) => node));
    const watch = new IntersectionObserver((changes) => {
      for (const { target, isIntersecting } of changes) near[isIntersecting ? "add" : "delete"](target);
      wake();
    }, { rootMargin: "50% 0px" });
    for (const { plots: [{ node }] } of sources.slice(1)) watch.observe(node);
    while (sources.length) {
      if (plots.length) toFirst();
      const place = sources.findIndex(({ plots: [{ node }] }) => near.has(node));
      if (place < 0) {
        await new Promise((done) => { wake = done; });
        continue;
      }
      const [next] = sources.splice(place, 1);
      watch.unobserve(next.plots[0].node);
      await (busy = busy.then(() => draw(next)));
      await painted();
      if (!root.dataset.first) root.dataset.first = String(Math.round(performance.now()));
    }
    toFirst();
    watch.disconnect();
    root.dataset.drawn = String(plots.length);
  }

  // A filter such as `workers=2 compressor=TopK`: a word with an operator tests a value, another word searches the row.
  // Values have the displayed units: a number is in the unit of the heading, a text is as in its cell.
  const COMPARE = {
    "=": (a, b, cell) => (typeof a === "string" || a === null
      ? [textOf(a), cell].some((text) => text.toLowerCase().includes(b.toLowerCase()))
      : String(a) === b.toLowerCase() || (b !== "" && (a === numberOf(b) || cell === b))),
    "!=": (a, b, cell) => !COMPARE["="](a, b, cell),
    ">=": (a, b) => a >= numberOf(b), "<=": (a, b) => a <= numberOf(b),
    ">": (a, b) => a > numberOf(b), "<": (a, b) => a < numberOf(b),
  };

  // Parses `51,200` and `80 %`, the formats of cells and headings.
  function numberOf(text) {
    return Number(text.replaceAll(",", "").replace(/\s*%$/, "") || NaN);
  }

  // Finds a name as typed, or as the heading of its column writes it.
  function nameOf(typed, names) {
    const plain = (name) => name.trim().toLowerCase().replaceAll(" ", "_");
    return names.find((name) => name === typed) ?? names.find((name) => plain(name) === plain(typed));
  }

  // Returns the tests of a filter, and its names that no run has. Quotes keep words together.
  function parseFilter(text, cellOf) {
    const names = [...new Set([...Object.keys(known.shared), ...Object.values(known.runs).flatMap(({ values }) => Object.keys(values))])];
    const unknown = [];
    const tests = (text.match(/(?:"[^"]*"?|[^\s"])+/g) || []).map((quoted) => {
      const word = quoted.replaceAll('"', "");
      const [, typed, sign, value] = /^([^!<>=]+)(!=|>=|<=|=|>|<)(.*)$/.exec(word) || [];
      if (!typed) return (key, row) => row.textContent.toLowerCase().includes(word.toLowerCase());
      const name = nameOf(typed, names);
      if (name === undefined) unknown.push(typed);
      return (key) => {
        const found = name === undefined ? undefined : valueOf(key, name);
        return found !== undefined && (found !== null || "!=".includes(sign)) && COMPARE[sign](found, value, cellOf(key, name));
      };
    });
    return [tests, unknown];
  }

  function filterStatus(passing, count, unknown, columns) {
    if (!passing) return "";
    const summary = `${passing.size} of ${count} pass`;
    return unknown.length ? `${summary}: no run has ${unknown.join(", ")}; available: ${columns.join(", ")}, and all parameters` : summary;
  }

  const usual = new Map(); // original border styles of swatches
  function swatches() {
    for (const swatch of all("[data-swatch]")) {
      const key = swatch.dataset.swatch;
      usual.set(swatch, usual.get(swatch) ?? swatch.style.borderTopStyle);
      swatch.style.borderTopColor = colorOf(key);
      swatch.style.borderTopStyle = state.by ? BORDERS[lookOf(key)[1]] : usual.get(swatch);
    }
    const most = COLORS.length * DASHES.length, count = state.by ? valuesOf(state.by).length : 0;
    if (count > most) status.textContent = `${count} values of ${state.by}: colours and dashes repeat after ${most}.`;
  }

  // Makes the table sortable, searchable and groupable; without DataTables it is a static table.
  function setUpTable() {
    const table = find("#table"), rows = all("tbody tr", table);
    const byKey = new Map(rows.map((row) => [row.dataset.key, row]));
    const heads = all("thead th", table).map((head) => head.dataset.name);
    const options = { paging: false, info: false, order: [], autoWidth: false, orderCellsTop: true,
      layout: { topStart: null, topEnd: null, bottomStart: null, bottomEnd: null },
      fixedColumns: { start: 1 }, rowGroup: { enable: false, dataSrc: () => "" } };
    const grid = new $.fn.dataTable(table, options);
    const cellOf = (key, name) => byKey.get(key).cells[heads.indexOf(name)]?.textContent ?? "";
    find("#filter").addEventListener("input", ({ target }) => {
      const [tests, unknown] = parseFilter(target.value, cellOf);
      state.passing = tests.length ? new Set([...byKey].filter(([key, row]) =>
        tests.every((test) => test(key, row))).map(([key]) => key)) : null;
      grid.search.fixed("typed", (_, __, place) => !state.passing ||
        state.passing.has(grid.row(place).node().dataset.key)).draw();
      status.textContent = filterStatus(state.passing, rows.length, unknown, heads);
      update();
    });
    find("#by").addEventListener("change", ({ target }) => {
      state.by = target.value;
      const place = heads.indexOf(state.by);
      grid.rowGroup().enable(Boolean(state.by));
      if (state.by) {
        // The cell's HTML is used because it is escaped; its text could contain markup.
        const cell = (data) => `${state.by} ${data[place].display ?? data[place]}`;
        grid.rowGroup().dataSrc(cell);
        grid.order.fixed({ pre: [[place, "asc"]] });
      } else grid.order.fixed({ pre: [] });
      grid.draw();
      swatches();
      update();
    });
    root.dataset.table = "ready";
  }

  function controls() {
    for (const bar of all(".controls")) bar.hidden = false;
    for (const box of boxes) box.addEventListener("change", () => update());
    for (const button of marks) button.addEventListener("click", () => choose(button.dataset.mark));
    for (const button of all("[data-pick]")) {
      button.addEventListener("click", () => {
        for (const box of boxes) box.checked = button.dataset.pick === "all";
        update();
      });
    }
    for (const radio of all("input[name=axis]")) {
      radio.addEventListener("change", () => { state.axis = radio.value; update(); });
      if (radio.checked) state.axis = radio.value;
    }
    const smooth = find("#smooth");
    smooth?.addEventListener("input", () => {
      state.smooth = Number(smooth.value);
      smooth.nextElementSibling.textContent = `${smooth.value} %`;
      update();
    });
    find("#facet")?.addEventListener("change", ({ target }) => { state.facet = target.value; update(true); });
    addEventListener("keydown", ({ key }) => { if (key === "Escape" && state.marked) choose(state.marked); });
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const scheme = () => root.classList.toggle("dark", dark.matches);
    dark.addEventListener("change", scheme);
    scheme();
    // Sorting is set up after the first figure, because the static table is already readable.
    // DataTables is a module of this page, which the browser runs before this event.
    if (find("#filter")) addEventListener("DOMContentLoaded", () => first.then(setUpTable));
  }

  // Before printing, all remaining figures are drawn. Folded parts stay folded, except the notebook's progress.
  // Figures are scaled to the paper, because there is no time to redraw them.
  addEventListener("beforeprint", () => {
    for (const source of sources.splice(0)) draw(source);
    wake();
    for (const { node } of plots.flatMap((source) => source.plots)) {
      const { width, height } = node._fullLayout;
      node.style.setProperty("--shape", `${width} / ${height}`);
      for (const svg of all(".main-svg", node)) svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    }
  });
  addEventListener("afterprint", () => {
    for (const svg of all(".plot .main-svg")) svg.removeAttribute("viewBox");
  });
  sources.push(...all("script.labkit-figure").map(read));
  controls();
  drawSeen();
})();
