// Drawing with Vega-Lite. A plot is drawn synchronously when it comes near the
// viewport, so
// that all plots can be drawn before printing.

const palettes = {
  light: {
    paper: "#ffffff", ink: "#1c2733", quiet: "#5b6a79", line: "#dfe5ea",
    colours: ["#0072b2", "#d55e00", "#009e73", "#aa3f87", "#b07f00", "#3a93c9",
      "#5b6a79", "#7a4b1f"],
    warn: "#b3261e",
  },
  dark: {
    paper: "#151b22", ink: "#e4eaf0", quiet: "#9fb0c0", line: "#2b3641",
    colours: ["#56b4e9", "#f0803c", "#2cc295", "#df8fc4", "#e6b422", "#9ad0f5",
      "#a9b6c2", "#d3a678"],
    warn: "#ff8a80",
  },
};

const plots = new Set();
let theme = "light";

function configOf(colours, narrow) {
  const font = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
  return {
    background: colours.paper,
    font,
    padding: 4,
    view: { stroke: colours.line },
    axis: {
      labelColor: colours.quiet, titleColor: colours.ink, gridColor: colours.line,
      domainColor: colours.line, tickColor: colours.line, labelFontSize: 11,
      titleFontSize: 11, titleFontWeight: "normal", labelFont: font, titleFont: font,
      labelOverlap: "greedy", titlePadding: 6,
    },
    header: { labelColor: colours.ink, titleColor: colours.ink, labelFontSize: 12,
      labelFontWeight: 600, labelPadding: 4 },
    legend: { labelColor: colours.ink, titleColor: colours.quiet, labelFontSize: 11,
      titleFontSize: 11, titleFontWeight: "normal", orient: "top", symbolSize: 60,
      symbolBaseFillColor: colours.quiet, symbolBaseStrokeColor: colours.quiet,
      columnPadding: 12, rowPadding: 2, labelLimit: 0,
      // Two legends side by side would be wider than a phone.
      layout: { top: { direction: narrow ? "vertical" : "horizontal", anchor: "start", margin: 8 } } },
    title: { color: colours.ink, subtitleColor: colours.quiet, fontSize: 13,
      subtitleFontSize: 11, anchor: "start", fontWeight: 600, offset: 8 },
    range: { category: colours.colours },
    mark: { color: colours.colours[0] },
    text: { color: colours.quiet, fontSize: 11, font },
    line: { strokeWidth: 2 },
    point: { filled: true, size: 45, opacity: 1 },
  };
}

const drawSoon = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) entry.target.plot.draw();
  }
}, { rootMargin: "600px" });

/** A figure with a plot. `spec({width, narrow, colours})` returns a Vega-Lite specification,
 *  `rows()` the data for CSV. `name` is the file name for saving, `context` describes the
 *  data, and `saved` is added to the saved file if the page shows it elsewhere. */
function plot({ name, title, context, saved, note, height = 300, spec, rows, onclick }) {
  const body = el("div", { class: "drawing", style: `min-height:${height}px` });
  const save = (kind) => el("button", { type: "button", class: "small",
    title: `Save as ${kind}`, onclick: () => savePlot(it, kind) }, kind);
  const node = el("figure", { class: "plot", "data-plot": name },
    el("figcaption", {}, el("span", { class: "title" }, title,
      context ? el("span", { class: "context" }, ` ${context}`) : null),
    el("span", { class: "saves" }, save("SVG"), save("PNG"), save("CSV"))),
    body, note ? el("p", { class: "note" }, note) : null);
  const it = { name, title, context: saved || context, spec, rows, onclick, node, body, view: null, width: 0, theme: null, draw() {
    const width = Math.floor(body.clientWidth);
    if (width === 0 || (it.view && it.width === width && it.theme === theme)) return;
    drawPlot(it, width);
  }, drop() {
    drawSoon.unobserve(node);
    if (it.view) it.view.finalize();
    plots.delete(it);
  } };
  node.plot = it;
  plots.add(it);
  drawSoon.observe(node);
  return node;
}

function compiledPlot(it, width, title) {
  const colours = palettes[theme];
  const narrow = it.width < 460;
  const spec = { config: configOf(colours, narrow), ...it.spec({ width, narrow, colours }), ...title };
  return { ...vegaLite.compile(spec).spec, description: `${it.title}, ${it.context || ""}` };
}

function drawPlot(it, width) {
  if (it.view) it.view.finalize();
  it.width = width;
  it.theme = theme;
  it.fitted = width;
  const make = () => {
    it.body.replaceChildren();
    it.view = new vega.View(vega.parse(compiledPlot(it, it.fitted)), { renderer: "svg", hover: true })
      .tooltip(showTip)
      .initialize(it.body)
      .run();
  };
  make();
  // The width of labels is known only after drawing.
  const drawn = it.view.scenegraph().root.bounds;
  const slack = width - 8 - (drawn.x2 - drawn.x1);
  if (slack > 6 || slack < 0) {
    it.view.finalize();
    it.fitted += Math.floor(slack) - 1;
    make();
  }
  if (it.onclick) {
    it.view.addEventListener("click", (event, item) => item && it.onclick(item.datum));
  }
  it.body.style.minHeight = "";
}

/** Drops plots that are no longer in the page. */
function dropPlots(inside) {
  for (const it of [...plots]) if (inside.contains(it.node)) it.drop();
}

function drawAll() {
  for (const it of plots) it.draw();
}

function redrawDrawn() {
  for (const it of plots) if (it.view) it.draw();
}

/** Sets the theme, "light" or "dark", and redraws all plots. */
function setTheme(name) {
  theme = name;
  document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = name === "dark" ? "Light" : "Dark";
  redrawDrawn();
}

function showTip(handler, event, item, value) {
  const tip = document.getElementById("tip");
  if (value == null || value === "") {
    tip.hidden = true;
    return;
  }
  const rows = typeof value === "object" ? Object.entries(value) : [["", value]];
  tip.replaceChildren(...rows.filter(([, text]) => text !== "" && text != null)
    .map(([name, text]) => el("div", {}, el("b", {}, name), el("span", {}, String(text)))));
  tip.hidden = false;
  const x = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18;
  const y = below + tip.offsetHeight > window.innerHeight
    ? event.clientY - tip.offsetHeight - 12 : below;
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${Math.max(4, y)}px`;
}

/** A separate view that includes the title shown above the plot. */
function savedView(it) {
  it.draw();
  const title = { title: { text: it.title, subtitle: it.context || "" } };
  return new vega.View(vega.parse(compiledPlot(it, it.fitted, title)), { renderer: "none" });
}

async function savePlot(it, kind) {
  const text = (type, content) => `data:${type};charset=utf-8,${encodeURIComponent(content)}`;
  const href = kind === "CSV" ? text("text/csv", csvText(it.rows()))
    : kind === "PNG" ? await savedView(it).toImageURL("png", 2)
    : text("image/svg+xml", await savedView(it).toSVG());
  const link = el("a", { href, download: `${it.name}.${kind.toLowerCase()}` });
  document.body.append(link);
  link.click();
  link.remove();
}

/** Every plot as {name, svg, png, csv}; png is base64. */
async function savedPlots() {
  const saved = [];
  for (const it of plots) {
    const view = savedView(it);
    saved.push({
      name: it.name,
      svg: await view.toSVG(),
      png: (await view.toImageURL("png", 2)).split(",")[1],
      csv: csvText(it.rows()),
    });
  }
  return saved;
}
