"use strict";
// Draws every figure of the page with the one Plotly above. What is seen is a function of the figures
// as they were written and of the state below, which the table and the controls change.
// A trace's meta says whose it is: `run`, one; `runs`, several; `points`, for each point its runs. `over`
// has its places on other x axes, `raw` what it is the moving mean of.
(() => {
  const FAINT = 0.12, NARROW = 700, USUAL = 5; // per cent of a run that Python has averaged
  const FACETS = 12; // so many values of a parameter have a plot each
  const COLORS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"];
  const DASHES = ["solid", "dash", "dot", "dashdot"], BORDERS = ["solid", "dashed", "dotted", "double"];
  const root = document.documentElement;
  const find = (selector, from = document) => from.querySelector(selector);
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  // shared, runs: by key label, color, values; a gallery's index has none.
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
  // One run alone has no box: there is nothing to choose.
  const chosenKeys = () => (boxes.length
    ? boxes.filter((box) => box.checked).map((box) => box.dataset.run) : Object.keys(known.runs));
  const shownKeys = () => new Set(chosenKeys().filter((key) => !state.passing || state.passing.has(key)));

  // Of a parameter's value: after six the colours begin anew, with another dash.
  function lookOf(key) {
    const place = valuesOf(state.by).indexOf(textOf(valueOf(key, state.by)));
    return [COLORS[place % COLORS.length], Math.floor(place / COLORS.length) % DASHES.length];
  }

  const colorOf = (key) => (state.by ? lookOf(key)[0] : known.runs[key].color);

  // The trace in another colour, a line in another dash; what is translucent stays so.
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

  // A centred moving mean, as in Python; gaps stay gaps.
  function smoothed(values, percent) {
    const reach = Math.floor((values.length * percent) / 200);
    return values.map((middle, place) => {
      if (middle === null) return null;
      const near = values.slice(Math.max(0, place - reach), place + reach + 1).filter((v) => v !== null);
      return near.reduce((sum, v) => sum + v, 0) / near.length;
    });
  }

  function seen(trace, shown, only) {
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
      const own = meta.points.map((each) => each.filter((key) => key in known.runs));
      copy.y = [...trace.y].map((y, point) => (own[point].length && !own[point].some(isIn) ? null : y));
      copy.selectedpoints = state.marked
        ? own.flatMap((each, point) => (each.includes(state.marked) ? [point] : [])) : undefined;
      if (state.by && copy.marker && Array.isArray(copy.marker.color)) {
        copy.marker = { ...copy.marker, color: own.map(([key]) => colorOf(key)) };
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
    return [data.map((trace) => seen(trace, shown, plot.only)), copy];
  }

  // Values of runs in view come first; of very many the first few have a plot.
  function facetsOf(name) {
    const every = valuesOf(name);
    if (every.length <= FACETS) return [every, ""];
    const seen = new Set([...shownKeys()].map((key) => textOf(valueOf(key, name))));
    const values = [...seen, ...every.filter((value) => !seen.has(value))].slice(0, FACETS);
    return [values, `${FACETS} of ${every.length} values of ${name}: a filter brings others here.`];
  }

  // Plots for each value of the facets' parameter; or one for all.
  function laid(source) {
    const holder = source.holder, first = source.plots[0];
    for (const { node } of source.plots.slice(1)) node.parentElement.remove();
    source.plots.length = 1;
    first.only = first.ends = null;
    for (const said of all(".facet", holder)) said.remove();
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

  // A panel that has no line of any run in view says so, rather than being empty.
  function explain(source) {
    const { holder, content: { data } } = source, shown = shownKeys();
    find(".unseen", holder)?.remove();
    const keys = new Set(data.flatMap((trace) => [...keysOf(trace), ...((trace.meta || {}).points || []).flat()]));
    if (!keys.size || !shown.size || [...keys].some((key) => shown.has(key))) return;
    holder.append(sentence("unseen note", `None of the runs in view is drawn here. This plot has ${keys.size} of ` +
      `${boxes.length} runs: those with results, and of very many some; a report of fewer runs has all.`));
  }

  function choose(key) {
    state.marked = key === state.marked ? "" : key;
    let name = "";
    for (const button of marks) {
      const on = button.dataset.mark === state.marked;
      button.setAttribute("aria-pressed", String(on));
      if (on) name = button.textContent.trim();
    }
    if (status) status.textContent = name && `${name} stands out.`;
    update();
  }

  function listen(node) {
    node.on("plotly_click", ({ points: [point] }) => {
      const { meta } = point.data;
      const key = meta && (meta.points ? meta.points[point.pointNumber][0] : meta.run);
      if (key in known.runs) choose(key);
    });
  }

  // Plotly's own buttons and slider answer to no keyboard: the page's do.
  function giveUpOwnControls(node, layout) {
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

  // The table is the legend of all figures of its runs, and the page has the switch of their axes.
  function giveUpLegend(node, data, layout) {
    const { legend = 0, over } = layout.meta || {};
    if (over && Object.keys(over).length) delete layout.updatemenus;
    const named = data.filter(({ showlegend, meta }) => showlegend && meta && meta.run);
    if (!legend || !named.every(({ meta }) => meta.run in known.runs)) return;
    layout.showlegend = false;
    shorten(node, layout, legend);
  }

  // On a phone panels that share a canvas stand one below the other.
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
      if (frames) giveUpOwnControls(node, layout);
      delete layout.width; // the page decides
      source.config = { ...config, displayModeBar: innerWidth < NARROW ? false : "hover" };
      if (!frames && Array.isArray(data)) {
        giveUpLegend(node, data, layout);
        source.content = { data, layout: fitted(node, data, layout) };
        source.faceted &&= data.some(({ meta }) => meta && meta.over);
      }
      const [traces, look] = source.content ? view(source.content, source.plots[0]) : [data, layout];
      node.textContent = ""; // its still picture
      const drawing = Plotly.newPlot(node, traces, look, source.config);
      plots.push(source);
      await drawing;
      if (frames) await animate(node, frames, layout);
      listen(node);
      offer(source);
      if (source.content && state.facet && source.faceted) await render(source, true);
      else if (source.content && boxes.length) explain(source);
    } catch (error) { // of a stranger's figure: its own line, and the others are drawn
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

  // Lets the page show what is drawn, and answer; a page in the background shows nothing.
  function painted() {
    const shown = new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    return Promise.race([shown, new Promise((done) => setTimeout(done, 200))]);
  }

  // All figures anew, one after the other; a later change takes the place of what is not yet drawn.
  // One change after the other: facets come and go with places that another may be drawing in.
  function update(facets = false) {
    const own = ++turn;
    refacet ||= facets || Boolean(state.facet) && valuesOf(state.facet).length > FACETS;
    delete root.dataset.settled;
    busy = busy.then(() => own === turn && redraw(own));
  }

  async function render(source, facets) {
    if (facets) laid(source);
    if (boxes.length) explain(source);
    for (const plot of source.plots) {
      const isNew = !plot.node._fullLayout;
      await Plotly.react(plot.node, ...view(source.content, plot), source.config);
      if (isNew) listen(plot.node);
    }
  }

  async function redraw(own) {
    const facets = refacet;
    refacet = false;
    for (const source of plots) {
      if (!source.content) continue;
      await render(source, facets);
      await painted();
      if (own !== turn && !facets) return;
    }
    if (own === turn) root.dataset.settled = String(turn);
  }

  // The first, then whatever comes near the screen: until then its still picture stands there.
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

  // `workers=2 compressor=TopK`: a word with a sign asks for a value, any other is looked for in the row.
  // What is typed means what is shown: numbers in the unit of the head, a word or number as its cell has it.
  const COMPARE = {
    "=": (a, b, cell) => (typeof a === "string" || a === null
      ? [textOf(a), cell].some((text) => text.toLowerCase().includes(b.toLowerCase()))
      : String(a) === b.toLowerCase() || (b !== "" && (a === numberOf(b) || cell === b))),
    "!=": (a, b, cell) => !COMPARE["="](a, b, cell),
    ">=": (a, b) => a >= numberOf(b), "<=": (a, b) => a <= numberOf(b),
    ">": (a, b) => a > numberOf(b), "<": (a, b) => a < numberOf(b),
  };

  // `51,200` and `80 %`, as cells and heads write them.
  function numberOf(text) {
    return Number(text.replaceAll(",", "").replace(/\s*%$/, "") || NaN);
  }

  // A name as it is, or as the head of its column says it.
  function nameOf(typed, names) {
    const plain = (name) => name.trim().toLowerCase().replaceAll(" ", "_");
    return names.find((name) => name === typed) ?? names.find((name) => plain(name) === plain(typed));
  }

  // The tests that a filter makes of a row, and what of it no row knows. Quotes keep words together.
  function asks(text, cellOf) {
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

  function told(passing, count, unknown, columns) {
    if (!passing) return "";
    const said = `${passing.size} of ${count} pass`;
    return unknown.length ? `${said}: no run has ${unknown.join(", ")}; there are ${columns.join(", ")}, and all parameters` : said;
  }

  const usual = new Map(); // borders of swatches
  function swatches() {
    for (const swatch of all("[data-swatch]")) {
      const key = swatch.dataset.swatch;
      usual.set(swatch, usual.get(swatch) ?? swatch.style.borderTopStyle);
      swatch.style.borderTopColor = colorOf(key);
      swatch.style.borderTopStyle = state.by ? BORDERS[lookOf(key)[1]] : usual.get(swatch);
    }
    const most = COLORS.length * DASHES.length, count = state.by ? valuesOf(state.by).length : 0;
    if (count > most) status.textContent = `${count} values of ${state.by}: after ${most} colours and dashes begin anew.`;
  }

  // The rows are there without it; with it they sort, filter and stand in groups.
  function tabled() {
    const table = find("#table"), rows = all("tbody tr", table);
    const byKey = new Map(rows.map((row) => [row.dataset.key, row]));
    const heads = all("thead th", table).map((head) => head.dataset.name);
    const options = { paging: false, info: false, order: [], autoWidth: false, orderCellsTop: true,
      layout: { topStart: null, topEnd: null, bottomStart: null, bottomEnd: null },
      fixedColumns: { start: 1 }, rowGroup: { enable: false, dataSrc: () => "" } };
    const grid = new DataTable(table, options);
    const cellOf = (key, name) => byKey.get(key).cells[heads.indexOf(name)]?.textContent ?? "";
    find("#filter").addEventListener("input", ({ target }) => {
      const [wanted, unknown] = asks(target.value, cellOf);
      state.passing = wanted.length ? new Set([...byKey].filter(([key, row]) =>
        wanted.every((each) => each(key, row))).map(([key]) => key)) : null;
      grid.search.fixed("typed", (_, __, place) => !state.passing ||
        state.passing.has(grid.row(place).node().dataset.key)).draw();
      status.textContent = told(state.passing, rows.length, unknown, heads);
      update();
    });
    find("#by").addEventListener("change", ({ target }) => {
      state.by = target.value;
      const place = heads.indexOf(state.by);
      grid.rowGroup().enable(Boolean(state.by));
      if (state.by) {
        // A cell's HTML as it stands, escaped; read as text it would be somebody's markup.
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
    // The rows can be read without: the first figure comes before what sorts them.
    if (find("#filter")) addEventListener("tables", () => first.then(tabled), { once: true });
  }

  // What is not yet drawn on the screen is part of the printed page; what is folded stays so, but for
  // the notebook's progress. A figure is scaled to the paper as it is: there is no time to draw it anew.
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
