// Plotly redraws a figure from the whole widget state after each change, so no message is lost.
// This module is small, because anywidget waits only two seconds for a module; afterwards the
// widget would receive no changes. Plotly (five megabytes) is loaded separately without a timeout.

const FAINT = 0.12; // opacity of runs that are not selected
const CONFIG = { displaylogo: false, showSendToCloud: false, plotlyServerURL: "" };

/** Load Plotly once for all figures of a page. */
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

/** Highlight a run (an empty key highlights none), and keep all other changes in the browser. */
async function mark(Plotly, plot, key) {
  for (const [place, { meta }] of plot.data.entries()) {
    const owners = meta?.runs ?? (meta?.run ? [meta.run] : []);
    if (meta?.points) {
      const own = meta.points.flatMap((keys, point) => (keys.includes(key) ? [point] : []));
      await Plotly.restyle(plot, { selectedpoints: [key ? own : null] }, [place]);
    } else if (owners.length) {
      const opacity = !key || owners.includes(key) ? 1 : FAINT;
      await Plotly.restyle(plot, { opacity }, [place]);
    }
  }
}

async function render({ model, el }) {
  const plot = el.appendChild(document.createElement("div"));
  // The plot has a layout, so that text can be measured, but it is still invisible.
  plot.style.cssText = "visibility: hidden; height: 0; overflow: hidden";
  const Plotly = await plotly(model);
  let busy = false;
  let due = false;
  let drawn; // the last drawn figure
  let marked = ""; // the highlighted run
  let current = model.get("ended"); // whether the state is at least as new as the picture

  /** Draw the current state; a slow browser skips intermediate states. */
  async function draw() {
    due = true;
    if (busy) return;
    busy = true;
    while (due) {
      due = false;
      const [figure, chosen] = [model.get("figure"), model.get("chosen")];
      const width = Math.min(el.clientWidth || figure.layout.width, figure.layout.width);
      if (figure !== drawn) {
        await Plotly.react(plot, figure.data, { ...figure.layout, width }, CONFIG);
        if (!drawn) listen();
        [drawn, marked] = [figure, ""];
      } else if (plot.layout.width !== width) await Plotly.relayout(plot, { width });
      if (chosen !== marked) await mark(Plotly, plot, (marked = chosen));
      if (current) show();
    }
    busy = false;
  }

  /** Select a run by a click on its line, marker or name; deselect it by a second click. */
  function listen() {
    const choose = (key) => {
      model.set("chosen", model.get("chosen") === key ? "" : key);
      model.save_changes();
    };
    plot.on("plotly_click", ({ points: [{ data, pointNumber }] }) => {
      const { points, run } = data.meta ?? {};
      const key = points ? points[pointNumber][0] : run;
      if (key) choose(key);
    });
    plot.on("plotly_legendclick", ({ data, curveNumber }) => {
      const key = data[curveNumber].meta?.run;
      if (key) choose(key);
      return !key; // true lets Plotly hide the trace
    });
  }

  /** Show the plot and hide the placeholder picture. */
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
  observer.observe(el); // also triggers the first drawing
  return () => {
    observer.disconnect();
    Plotly.purge(plot);
  };
}

export default { render };
