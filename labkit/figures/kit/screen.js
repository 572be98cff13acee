// Plotly draws a figure from all of its state, whenever that changes; no message is missed so.
// This module is small: anywidget gives a module two seconds to come up, and without that its
// widget never hears of a change again. Plotly, of five megabytes, may take as long as it likes.

const FAINT = 0.12; // opacity of what is not chosen
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

/** Let a run stand out; the empty key: all alike. What else was changed in the browser stays. */
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
  // Laid out, so that text can be measured, but not seen yet.
  plot.style.cssText = "visibility: hidden; height: 0; overflow: hidden";
  const Plotly = await plotly(model);
  let busy = false;
  let due = false;
  let drawn; // the figure that was drawn last
  let marked = ""; // the run that stands out there
  let current = model.get("ended"); // whether what is drawn cannot be older than the picture

  /** Draw what there is by now; a browser that is slower than the changes leaves some out. */
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

  /** A click on its line, its marker or its name chooses a run, a second one lets it go. */
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
      return !key; // whether Plotly hides it
    });
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
