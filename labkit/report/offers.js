"use strict";
// Downloads for each plot: its data as CSV, and an SVG file for publications.
const offers = (() => {
  const WIDTH = 640, HEIGHT = 380, LEGEND = 22, INK = "#000000", PAPER = "#ffffff";
  // Trace fields that may have one value per point.
  const COLUMNS = ["labels", "values", "x", "y", "z", "r", "theta", "lat", "lon", "open", "high", "low", "close"];
  const plain = (text) => new DOMParser().parseFromString(String(text ?? ""), "text/html").body.textContent;
  const isList = (value) => Array.isArray(value) || ArrayBuffer.isView(value);
  const isShown = (trace) => trace.visible === undefined || trace.visible === true;

  // Returns the keys of the runs that a point shows: those of the point, or else those of its trace.
  function keysOf({ points, runs, run } = {}, point) {
    return points ? points[point] || [] : runs || (run ? [run] : []);
  }

  // Returns the role of a run's line without hover text: an edge of a band, or the unsmoothed data.
  function kindOf({ hoverinfo, line, fill, meta }) {
    if (hoverinfo !== "skip" || !line || !keysOf(meta).length) return "";
    return line.width === 0 ? (fill && fill !== "none" ? "greatest" : "least") : "unsmoothed";
  }

  const axisOf = (layout, trace, letter) => layout[`${letter}axis${(trace[`${letter}axis`] || "").slice(1)}`] || {};

  // Names CSV columns after the axes; a column whose axis has neither a title nor tick labels has no name.
  function namesOf(layout, trace, columns) {
    const named = {};
    for (const column of columns) {
      const axis = /^[xy]$/.test(column) ? axisOf(layout, trace, column) : {};
      const title = plain(axis.title && axis.title.text);
      if (title || axis.showticklabels !== false) named[column] = title || column;
    }
    if (named.x && named.x === named.y) named.y += " (y)";
    return named;
  }

  // Returns the tick text of a value if its axis has tick texts, and else the value.
  function worded({ tickvals, ticktext, type }, value) {
    const at = isList(tickvals) && isList(ticktext) && type !== "log" ? [...tickvals].indexOf(value) : -1;
    return at < 0 ? value : plain(ticktext[at]);
  }

  // Yields the CSV rows of a trace from the data that Plotly has parsed, in which packed arrays are unpacked.
  function* rowsOf(trace, layout, labelOf) {
    const { meta } = trace;
    const runText = (point) => keysOf(meta, point).map((key) => labelOf(key) ?? key).join("; ") || plain(trace.name);
    if (trace.hoverinfo === "skip" && !keysOf(meta, 0).length && !trace.name) return; // such traces are decorations without data
    const across = axisOf(layout, trace, "x");
    if (trace.hovertemplate === "%{text}" && isList(trace.text) && isList(across.ticktext)) {
      // Parallel coordinates: each axis has the run's text, and the axis title names the column.
      const texts = [...trace.text].map((text, place) => [plain(across.ticktext[place]), plain(text)]);
      yield { run: runText(0), ...Object.fromEntries(texts.map(([name, text]) => [name, text.replace(`${name}: `, "")])) };
    } else if (trace.type === "parcoords") {
      const shown = trace.dimensions.filter(({ values }) => isList(values));
      for (let place = 0; place < (shown.length && shown[0].values.length); place++) {
        yield { run: runText(place), ...Object.fromEntries(shown.map((axis) => [plain(axis.label), worded(axis, axis.values[place])])) };
      }
    } else if (isList(trace.z) && isList(trace.z[0])) {
      const { x = "x", y = "y" } = namesOf(layout, trace, ["x", "y"]);
      const down = axisOf(layout, trace, "y");
      for (const [row, cells] of [...trace.z].entries()) {
        for (const [place, z] of [...cells].entries()) {
          yield { [x]: worded(across, trace.x ? trace.x[place] : place),
            [y]: worded(down, trace.y ? trace.y[row] : row), value: z };
        }
      }
    } else {
      const columns = COLUMNS.filter((column) => isList(trace[column]));
      const names = namesOf(layout, trace, columns), kind = kindOf(trace);
      const length = Math.max(0, ...columns.map((column) => trace[column].length));
      for (let place = 0; place < length; place++) {
        const row = { run: runText(place), what: kind };
        for (const column of Object.keys(names)) row[names[column]] = trace[column][place];
        for (const [axis, end] of ["x", "y"].flatMap((letter) => [[letter, "array"], [letter, "arrayminus"]])) {
          const bars = trace[`error_${axis}`];
          if (bars && bars.visible && isList(bars[end])) row[`${names[axis]} ${end === "array" ? "+" : "-"}`] = bars[end][place];
        }
        // A gap in a line gives no row.
        if (columns.some((column) => trace[column][place] !== null && trace[column][place] !== undefined)) yield row;
      }
    }
  }

  function cell(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "";
    if (typeof value === "number") return String(value);
    // The apostrophe keeps spreadsheets from reading the text as a formula.
    const text = plain(value).replaceAll("\r", " ").replace(/^(?=[=+\-@\t])/, "'");
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  }

  function csv(plots, labelOf) {
    const rows = plots.flatMap(({ node }) => node._fullData.filter(isShown)
      .flatMap((trace) => [...rowsOf(trace, node._fullLayout, labelOf)]));
    const columns = [...new Set(rows.flatMap((row) => Object.keys(row)))]
      .filter((column) => rows.some((row) => row[column] !== "" && row[column] !== undefined));
    return [columns.map(cell), ...rows.map((row) => columns.map((column) => cell(row[column])))]
      .map((line) => line.join(",") + "\n").join("");
  }

  // Returns the SVG in black on white, with the title and the legend that the page shows outside the plot.
  async function svg({ data, layout }, title, labelOf) {
    const named = new Map();
    const traces = data.map((trace) => {
      const keys = keysOf(trace.meta), name = keys.map((key) => labelOf(key) ?? key).join("; ");
      if (!isShown(trace) || trace.hoverinfo === "skip" || !name || named.has(name)) return trace;
      named.set(name, true);
      return { ...trace, name, showlegend: true };
    });
    const titleText = plain(layout.title && layout.title.text), legend = layout.showlegend !== false;
    const look = { ...layout, width: WIDTH, height: HEIGHT, autosize: false, paper_bgcolor: PAPER, plot_bgcolor: PAPER,
      font: { ...layout.font, color: INK, family: "Helvetica, Arial, sans-serif" } };
    for (const name of Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key))) {
      look[name] = { ...layout[name], color: INK, linecolor: INK, gridcolor: "#dddddd" };
    }
    if (titleText || legend) look.height = layout.height || 450; // A whole figure contains its own title and legend.
    else {
      look.title = { text: title, font: { size: 14 }, x: 0.02, xanchor: "left", y: 0.98, yanchor: "top" };
      look.margin = { ...layout.margin, t: 40 };
      if (named.size > 1) {
        look.showlegend = true;
        look.legend = { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom", bgcolor: PAPER };
        look.height += LEGEND * Math.ceil(named.size / 2);
        look.margin.b = ((layout.margin && layout.margin.b) || 50) + LEGEND * Math.ceil(named.size / 2);
      }
    }
    delete look.updatemenus;
    delete look.sliders;
    const size = { width: look.width, height: look.height };
    const url = await Plotly.toImage({ data: traces, layout: look }, { format: "svg", ...size });
    return decodeURIComponent(url.slice(url.indexOf(",") + 1));
  }

  function save(name, type, text) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name.toLowerCase().replace(/[^a-z0-9.]+/g, "-").replace(/^-|-(?=\.)/g, "");
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  }

  // Adds the buttons of a figure; labelOf returns the table's label of a run.
  function put(place, title, source, labelOf) {
    const name = `${document.title} ${title}`;
    const ways = {
      CSV: () => save(`${name}.csv`, "text/csv", csv(source.plots, labelOf)),
      SVG: async () => {
        for (const [number, { node }] of source.plots.entries()) {
          const facet = node.parentElement.querySelector(".facet")?.textContent ?? "";
          const text = await svg(node, facet ? `${title}: ${facet}` : title, labelOf);
          save(`${name} ${facet || number || ""}.svg`, "image/svg+xml", text);
        }
      },
    };
    for (const [way, act] of Object.entries(ways)) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = way;
      button.setAttribute("aria-label", `${way}: ${title}`);
      button.addEventListener("click", act);
      place.append(button);
    }
  }

  return { put };
})();
