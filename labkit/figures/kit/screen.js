// Plotly draws a figure from all of its state, whenever that changes; no message is missed so.
// This module is small: anywidget gives a module two seconds to come up, and without that its
// widget never hears of a change again. Plotly, of five megabytes, may take as long as it likes.

const CONFIG = { displaylogo: false, showSendToCloud: false, plotlyServerURL: "" };

/** Plotly, once for all figures of a page. */
function plotly(model) {
  window.labkitPlotly ??= model.widget_manager
    .get_model(model.get("_source"))
    .then((source) => {
      const sent = new Promise((take) => source.once("msg:custom", (_, buffers) => take(buffers)));
      source.send({});
      return sent;
    })
    .then((buffers) => import(URL.createObjectURL(new Blob(buffers, { type: "text/javascript" }))))
    .then(() => window.Plotly);
  return window.labkitPlotly;
}

async function render({ model, el }) {
  const plot = el.appendChild(document.createElement("div"));
  // Laid out, so that text can be measured, but not seen yet.
  plot.style.cssText = "visibility: hidden; height: 0; overflow: hidden";
  const Plotly = await plotly(model);
  let busy = false;
  let due = false;
  let current = model.get("ended"); // whether what is drawn cannot be older than the picture

  /** Draw what there is by now; a browser that is slower than the changes leaves some out. */
  async function draw() {
    due = true;
    if (busy) return;
    busy = true;
    while (due) {
      due = false;
      const { data, layout } = model.get("figure");
      const width = Math.min(el.clientWidth || layout.width, layout.width);
      await Plotly.react(plot, data, { ...layout, width }, CONFIG);
      if (current) show();
    }
    busy = false;
  }

  /** Take the place of the picture that stood in. */
  function show() {
    plot.style.cssText = "";
    const picture = el.closest(".labkit-screen")?.querySelector(".labkit-picture");
    if (picture) picture.style.display = "none";
  }

  model.on("change", () => {
    current = true;
    draw();
  });
  const observer = new ResizeObserver(draw);
  observer.observe(el); // which draws for the first time
  return () => {
    observer.disconnect();
    Plotly.purge(plot);
  };
}

export default { render };
