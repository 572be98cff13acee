"use strict";
// Draws every figure of the page with the one Plotly above, and shows or hides runs in all of them.
(() => {
  const boxes = [...document.querySelectorAll("input[data-run]")];
  const plots = [];

  function pick() {
    const wanted = new Map(boxes.map((box) => [box.dataset.run, box.checked]));
    for (const plot of plots) {
      const places = [], visible = [];
      plot.data.forEach((trace, place) => {
        const run = trace.meta && trace.meta.run;
        if (wanted.has(run)) {
          places.push(place);
          visible.push(wanted.get(run));
        }
      });
      if (places.length) Plotly.restyle(plot, { visible }, places);
    }
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

  async function draw() {
    for (const source of document.querySelectorAll("script.labkit-figure")) {
      const plot = source.parentElement.querySelector(".plot");
      const { data, layout, config, frames } = JSON.parse(source.textContent);
      if (frames) giveUpOwnControls(plot, layout);
      delete layout.width; // the page decides
      try {
        await Plotly.newPlot(plot, data, layout, config);
        plots.push(plot);
        if (frames) await animate(plot, frames, layout);
      } catch (error) {
        plot.textContent = "This figure cannot be drawn: " + error.message;
      }
      await new Promise((done) => setTimeout(done)); // let the page answer between two figures
    }
    pick(); // a reload keeps the boxes as they were
    document.documentElement.dataset.drawn = String(plots.length);
  }

  for (const box of boxes) box.addEventListener("change", pick);
  for (const bar of document.querySelectorAll(".picker")) bar.hidden = false;
  for (const button of document.querySelectorAll("[data-pick]")) {
    button.addEventListener("click", () => {
      for (const box of boxes) box.checked = button.dataset.pick === "all";
      pick();
    });
  }
  // What is folded on the screen is part of the printed page.
  addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details:not(.code)")) part.open = true;
  });
  draw();
})();
