"use strict";
// Draws every figure of the page with the one Plotly above; shows, hides and marks runs in all of them.
// A trace's meta says whose it is: `run`, one; `runs`, several; `points`, for each point its runs.
(() => {
  const FAINT = 0.12;
  const boxes = [...document.querySelectorAll("input[data-run]")];
  const marks = [...document.querySelectorAll("[data-mark]")];
  const status = document.querySelector(".chosen");
  const sources = [...document.querySelectorAll("script.labkit-figure")];
  const plots = [];
  const root = document.documentElement;
  let marked = "";

  const wanted = () => new Map(boxes.map((box) => [box.dataset.run, box.checked]));
  const keysOf = (trace) => (trace.meta && (trace.meta.runs || (trace.meta.run && [trace.meta.run]))) || [];
  const pointsOf = (trace) => trace.meta && trace.meta.points;

  // Attributes of traces by place: { visible: new Map([[3, false]]) }; one call for each attribute.
  function restyle(plot, attribute, values) {
    if (values.size) Plotly.restyle(plot, { [attribute]: [...values.values()] }, [...values.keys()]);
  }

  function pick(plot, shown) {
    const visible = new Map(), heights = new Map();
    plot.data.forEach((trace, place) => {
      const own = keysOf(trace).filter((key) => shown.has(key));
      if (own.length) visible.set(place, own.some((key) => shown.get(key)));
      if (!pointsOf(trace)) return;
      const whole = (plot.wholes[place] ||= [...trace.y]);
      const gone = (keys) => keys.every((key) => shown.get(key) === false);
      heights.set(place, whole.map((y, point) => (gone(trace.meta.points[point]) ? null : y)));
    });
    restyle(plot, "visible", visible);
    restyle(plot, "y", heights);
  }

  function mark(plot) {
    const opacity = new Map(), selected = new Map();
    plot.data.forEach((trace, place) => {
      const keys = keysOf(trace), points = pointsOf(trace);
      if (keys.length) opacity.set(place, !marked || keys.includes(marked) ? 1 : FAINT);
      const own = () => points.flatMap((each, point) => (each.includes(marked) ? [point] : []));
      if (points) selected.set(place, marked ? own() : null);
    });
    restyle(plot, "opacity", opacity);
    restyle(plot, "selectedpoints", selected);
  }

  function choose(key) {
    marked = key === marked ? "" : key;
    let name = "";
    for (const button of marks) {
      const on = button.dataset.mark === marked;
      button.setAttribute("aria-pressed", String(on));
      if (on) name = button.textContent.trim();
    }
    if (status) status.textContent = name && `${name} stands out.`;
    plots.forEach(mark);
  }

  function listen(plot) {
    plot.on("plotly_click", ({ points: [point] }) => {
      const { meta } = point.data;
      const key = meta && (meta.points ? meta.points[point.pointNumber][0] : meta.run);
      if (marks.some((button) => button.dataset.mark === key)) choose(key);
    });
    plot.on("plotly_legendclick", ({ data, curveNumber }) => {
      const key = keysOf(data[curveNumber])[0];
      if (!marks.some((button) => button.dataset.mark === key)) return true;
      choose(key);
      return false; // hiding is what the boxes do
    });
  }

  // Plotly's own buttons and slider answer to no keyboard: the page's do.
  function giveUpOwnControls(plot, layout) {
    const height = (layout.meta && layout.meta.controls) || 0;
    const { active = 0, currentvalue = {} } = (layout.sliders || [{}])[0];
    layout.meta = { ...layout.meta, start: active, prefix: currentvalue.prefix || "frame " };
    delete layout.sliders;
    delete layout.updatemenus;
    if (!height) return;
    layout.height -= height;
    layout.margin.b -= height;
    plot.style.minHeight = `${layout.height}px`;
  }

  async function animate(plot, frames, layout) {
    await Plotly.addFrames(plot, frames);
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
      if (redraw) Plotly.animate(plot, [frames[place].name], frame);
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
    plot.after(bar);
  }

  async function draw(source) {
    const plot = source.parentElement.querySelector(".plot");
    try {
      const { data, layout, config, frames } = JSON.parse(source.textContent);
      if (frames) giveUpOwnControls(plot, layout);
      delete layout.width; // the page decides
      const drawing = Plotly.newPlot(plot, data, layout, config);
      plot.wholes = {};
      plots.push(plot);
      await drawing;
      if (frames) await animate(plot, frames, layout);
      listen(plot);
      const shown = wanted();
      if ([...shown.values()].includes(false)) pick(plot, shown); // a reload keeps the boxes as they were
      if (marked) mark(plot);
    } catch (error) { // of a stranger's figure: its own line, and the others are drawn
      if (plots.at(-1) === plot) plots.pop();
      plot.textContent = "This figure cannot be drawn: " + error.message;
    }
  }

  // Lets the page show what is drawn, and answer; a page in the background shows nothing.
  function painted() {
    const shown = new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    return Promise.race([shown, new Promise((done) => setTimeout(done, 200))]);
  }

  // What is on the screen comes first, then the rest from above to below.
  async function drawAll() {
    const onScreen = new Set();
    const watch = new IntersectionObserver((changes) => {
      for (const { target, isIntersecting } of changes) onScreen[isIntersecting ? "add" : "delete"](target);
    });
    for (const { parentElement } of sources) watch.observe(parentElement);
    while (sources.length) {
      const seen = sources.findIndex(({ parentElement }) => onScreen.has(parentElement));
      const [next] = sources.splice(Math.max(seen, 0), 1);
      await draw(next);
      await painted();
      if (!root.dataset.first) root.dataset.first = String(Math.round(performance.now()));
    }
    watch.disconnect();
    root.dataset.drawn = String(plots.length);
  }

  function pickAll() {
    const shown = wanted();
    for (const plot of plots) pick(plot, shown);
  }

  for (const box of boxes) box.addEventListener("change", pickAll);
  for (const button of marks) button.addEventListener("click", () => choose(button.dataset.mark));
  for (const bar of document.querySelectorAll(".picker")) bar.hidden = false;
  for (const button of document.querySelectorAll("[data-pick]")) {
    button.addEventListener("click", () => {
      for (const box of boxes) box.checked = button.dataset.pick === "all";
      pickAll();
    });
  }
  addEventListener("keydown", ({ key }) => { if (key === "Escape" && marked) choose(marked); });
  // What is folded or not yet drawn on the screen is part of the printed page, all but code. A figure
  // is scaled to the paper as it is: there is no time to draw it anew.
  const unfolded = new Set();
  addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details:not(.code, [open])")) {
      part.open = true;
      unfolded.add(part);
    }
    for (const source of sources.splice(0)) draw(source);
    for (const plot of plots) {
      const { width, height } = plot._fullLayout;
      plot.style.setProperty("--shape", `${width} / ${height}`);
      for (const svg of plot.querySelectorAll(".main-svg")) svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    }
  });
  addEventListener("afterprint", () => {
    for (const part of unfolded) part.open = false;
    unfolded.clear();
    for (const svg of document.querySelectorAll(".plot .main-svg")) svg.removeAttribute("viewBox");
  });
  drawAll();
})();
