"use strict";
  // On a phone the panels of a canvas are stacked: each panel is as wide as the screen and keeps its height.
  // A figure with a single long panel is not changed if the panel contains text, or labels of many bars.
const narrow = (() => {
  const LINE = 17, LETTER = 7.2, LEGEND_LINE = 30, FEW = 6; // sizes in pixels; FEW is a number of texts

  // Breaks a text with tags into lines of at most `letters` letters; returns the text and the number of added lines.
  function broken(text, letters) {
    let used = 0, added = 0;
    const parts = (text.match(/<[^>]*>|[^<\s]+|\s+/g) || []).map((part) => {
      if (part.startsWith("<")) {
        if (part.startsWith("<br")) used = 0;
        return part;
      }
      used += part.length;
      if (used <= letters || used === part.length || !part.trim()) return part;
      [used, added] = [part.length, added + 1];
      return `<br>${part}`;
    });
    return [parts.join(""), added];
  }

  function panelsOf(layout) {
    const names = Object.keys(layout).filter((name) => /^xaxis\d*$/.test(name));
    const found = names.map((x) => ({ x, y: x.replace("x", "y") }))
      .filter(({ x, y }) => layout[x].domain && layout[y] && layout[y].domain)
      .map(({ x, y }) => ({ x, y, across: layout[x].domain, up: layout[y].domain, words: [] }));
    return found.sort((a, b) => b.up[1] - a.up[1] || a.across[0] - b.across[0]);
  }

  function isWorded(panels, layout, data) {
    const written = data.filter(({ mode, texttemplate, type, text }) =>
      String(mode).includes("text") || texttemplate || (type === "bar" && text));
    return written.reduce((sum, { x }) => sum + (x?.length ?? FEW + 1), 0) > FEW ||
      panels.some(({ x }) => (layout[x].ticktext || []).length > FEW) || data.some(({ x }) => typeof x?.[0] === "string");
  }

  // Returns the layout of stacked panels for a screen width in pixels, or the same layout if a stack would be illegible.
  function stacked(layout, data, width) {
    const panels = panelsOf(layout), { t, b, l, r } = layout.margin || {};
    const abreast = new Set(panels.map(({ across }) => across[0])).size > 1;
    if (!panels.length || t === undefined || (!abreast && isWorded(panels, layout, data))) return layout;
    const inner = layout.height - t - b, letters = (width - l - r) / LETTER, near = 1e-6;
    const tops = [...new Set(panels.map(({ up }) => up[1]))], above = 1 - tops[0];
    const copy = { ...layout, annotations: [], margin: { ...layout.margin } };
    for (const note of layout.annotations || []) {
      const panel = panels.find(({ across, up }) => note.xref === "paper" && note.x >= across[0] - near &&
        note.x <= across[1] + near && note.y >= up[0] - near && note.y <= up[1] + near);
      if (!panel) { copy.annotations.push(note); continue; }
      const [text, added] = broken(note.text, letters);
      const isTitle = Math.abs(note.y - panel.up[1]) < near;
      panel.words.push({ ...note, text, isTitle, added });
    }
    for (const panel of panels) {
      const row = tops.indexOf(panel.up[1]), end = row + 1 < tops.length ? tops[row + 1] : -above;
      const lines = (kind) => panel.words.filter(({ isTitle }) => isTitle === kind).reduce((sum, { added }) => sum + added, 0);
      panel.head = above * inner + LINE * lines(true);
      panel.plot = (panel.up[1] - panel.up[0]) * inner;
      panel.height = panel.head + (panel.up[1] - end - above) * inner + LINE * lines(false);
    }
    const whole = panels.reduce((sum, { height }) => sum + height, 0);
    let before = 0;
    for (const { x, y, across, up, words, head, plot, height } of panels) {
      const top = 1 - (before + head) / whole, bottom = top - plot / whole;
      before += height;
      copy[x] = { ...layout[x], domain: [0, 1] };
      copy[y] = { ...layout[y], domain: [bottom, top], automargin: true };
      delete copy[y].showticklabels; // Next to other panels, only the first panel shows the row names.
      for (const { isTitle, added, ...note } of words) {
        copy.annotations.push({ ...note, x: (note.x - across[0]) / (across[1] - across[0]),
          y: bottom + (note.y - up[0]) / (up[1] - up[0]) * (top - bottom) });
      }
    }
    const [text, more] = broken((layout.title && layout.title.text) || "", (width - l) / 8.5);
    const { subtitle } = layout.title || {}, [subtitleText, further] = broken((subtitle && subtitle.text) || "", (width - l) / LETTER);
    copy.title = { ...layout.title, text, ...(subtitle && { subtitle: { ...subtitle, text: subtitleText } }) };
    copy.margin.t += LINE * (more + further);
    // The padding is needed, because Plotly centres several title lines where one line would be.
    if (more) copy.title.pad = { ...copy.title.pad, t: 8 + LINE };
    const named = data.filter(({ showlegend }) => showlegend).map(({ name }) => String(name || ""));
    if (b && named.length) {
      const columns = Math.max(1, Math.floor(width / (Math.max(...named.map((name) => name.length)) * 6.4 + 50)));
      copy.margin.b = 10 + LEGEND_LINE * Math.ceil(named.length / columns);
    }
    copy.height = whole + copy.margin.t + copy.margin.b;
    return copy;
  }
  return { stacked };
})();
