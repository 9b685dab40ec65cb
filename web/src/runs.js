// The sortable table of all runs, and the details of one run with its observations.

/** Columns with long names, which may wrap. */
const WRAPPED = ["setting", "study", "device", "system"];
let allRuns = new Map();
let sortBy = { key: "order", down: false };

/** The axes that vary within each study. */
function studyAxes(runs) {
  return new Map([...groupBy(runs, (run) => run.axes.study).entries()].map(([study, own]) =>
    [study, varyingAxes(own).filter((axis) => axis !== "system")]));
}

function runColumns(runs) {
  const axes = varyingAxes(runs);
  const text = (axis) => ({ title: axisName(axis), key: axis,
    value: (run) => run.axes[axis], show: (run) => valueText(axis, run.axes[axis]),
    number: ["batch", "accumulate", "ranks", "image_size", "seq", "depth", "width"].includes(axis) });
  const figureColumn = (key, title, format) => ({ title, key, number: true,
    value: (run) => run.figures[key], show: (run) =>
      (run.figures[key] == null ? "–" : FORMATS[format](run.figures[key])) });
  // One table per study: combined, most columns would be empty.
  const shown = studyAxes(runs);
  const setting = (run) => [run.label, settingText(run.axes, shown.get(run.axes.study))]
    .filter(Boolean).join(": ");
  const named = runs.some((run) => run.label);
  const columns = shown.size > 1 || named
    ? [{ title: "setting", key: "setting", value: setting, show: setting },
      ...axes.filter((axis) => ["study", "device", "system"].includes(axis)).map(text)]
    : axes.map(text);
  return [
    ...columns,
    { title: "status", key: "status", value: (run) => run.status,
      show: (run) => [el("span", { class: `status ${run.status}` }, run.status),
        run.warnings.length ? el("span", { class: "status warned", title: run.warnings.join("; ") },
          " warning") : null] },
    figureColumn("samples_per_s", "samples/s", "number"),
    figureColumn("step_ms", "step", "ms"),
    figureColumn("epoch_s", "epoch", "seconds"),
    figureColumn("peak", "peak", "bytes"),
    ...(runs.some((run) => run.figures.dataset != null) ? [figureColumn("dataset", "dataset", "bytes")] : []),
    figureColumn("kept", "kept", "bytes"),
    { title: "utilisation", key: "utilisation", number: true,
      value: (run) => run.figures.utilisation,
      show: (run) => (run.figures.utilisation == null ? "–"
        : `${figures3(run.figures.utilisation)}${NO_BREAK}%`) },
    { title: "what sets the peak", key: "moment", value: (run) => momentText(run.peak_at) || "",
      show: (run) => momentText(run.peak_at) || "–" },
  ];
}

function runsView(runs) {
  const columns = runColumns(runs);
  const column = columns.find((c) => c.key === sortBy.key);
  const sorted = [...runs];
  if (column) {
    const empty = (v) => v == null || v === "";
    sorted.sort((a, b) => {
      const [x, y] = [column.value(a), column.value(b)];
      if (empty(x) || empty(y)) return empty(x) - empty(y);
      const order = typeof x === "number" && typeof y === "number" ? x - y : compareNatural(x, y);
      return sortBy.down ? -order : order;
    });
  }
  const box = el("div", {});
  const sort = (key) => {
    sortBy = { key, down: sortBy.key === key && !sortBy.down };
    box.replaceWith(runsView(runs));
  };
  box.append(el("div", { class: "scroll tall", tabindex: "0" }, el("table", { id: "runs" },
    el("thead", {}, el("tr", {}, el("th", {}, ""), columns.map((c) => el("th", {
      class: c.number ? "number" : null, scope: "col",
      "aria-sort": c === column ? (sortBy.down ? "descending" : "ascending") : "none",
    }, el("button", { type: "button", class: "link", onclick: () => sort(c.key) },
      c.title + (c === column ? (sortBy.down ? " ↓" : " ↑") : "")))))),
    el("tbody", {}, sorted.map((run) => el("tr", { "data-id": run.id },
      el("td", {}, el("button", { type: "button", class: "small open", onclick: () => openRun(run.id) },
        run.record.series ? "series" : "open")),
      columns.map((c) => el("td", { class: c.number ? "number" : WRAPPED.includes(c.key) ? "wraps" : null }, [c.show(run)].flat()))))))));
  return box;
}

function copyText(text, button) {
  const done = () => { button.textContent = "Copied"; };
  // Some browsers have no clipboard for file:// pages.
  const byHand = () => {
    const area = el("textarea", {}, text);
    button.after(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    done();
  };
  if (navigator.clipboard) navigator.clipboard.writeText(text).then(done, byHand);
  else byHand();
}

/** Facts about the ranks; none for a single rank. */
function rankRows(run) {
  const figures = run.record.figures || {};
  if (!(run.axes.ranks > 1)) return [];
  return [
    ["ranks", run.axes.ranks],
    ["gradients reduced", figures.reduce_calls > 0 ? figures.reduce_bytes : null,
      (v) => `${bytesText(v)} in ${figures.reduce_calls} calls`],
    ["of that hidden behind the backward",
      figures.reduce_s > 0 ? 1 - figures.reduce_wait_s / figures.reduce_s : null,
      (v) => `${figures3(100 * v)}${NO_BREAK}%`],
  ];
}

/** Opens one run: its command, its figures, and its series if there is one. */
function openRun(id) {
  const run = allRuns.get(id);
  const dialog = document.getElementById("run");
  dropPlots(dialog);
  const { record } = run;
  const observed = record.observed || {};
  const close = el("button", { type: "button", class: "small", onclick: () => dialog.close() }, "Close");
  const copy = el("button", { type: "button", class: "small",
    onclick: () => copyText(record.command, copy) }, "Copy");
  const rows = [
    ["status", run.status], ["reason", record.reason],
    ["warning", run.warnings.length ? run.warnings.join("; ") : null],
    ["predicted peak", record.predicted && bytesText(record.predicted.peak_bytes)],
    ["peak", run.figures.peak, bytesText], ["what sets it", momentText(run.peak_at)],
    ["dataset, not in the peak", run.figures.dataset, bytesText],
    ["kept after the forward", run.figures.kept, bytesText],
    ["reserved", run.figures.reserved, bytesText],
    ["seen by the observer", run.figures.seen, bytesText],
    ["before the run, taken off", observed.baseline && observed.baseline.memory_bytes, bytesText],
    ["average utilisation", run.figures.utilisation, (v) => `${figures3(v)}${NO_BREAK}%`],
    ["samples/s", run.figures.samples_per_s, figures3],
    ["time per step", run.figures.step_ms, millisecondsText],
    ["time per epoch", run.figures.epoch_s, secondsText],
    ...rankRows(run),
    ["device", run.axes.device], ["host", record.host], ["started", dateText(record.started)],
    ["versions", versionsText(record.versions)],
  ].filter(([, value]) => value != null)
    .map(([name, value, text]) => [name, text ? text(value) : String(value)]);
  const shown = ["model", "optimizer", "precision", "system", ...SIZE_AXES];
  dialog.replaceChildren(el("div", { class: "dialog-top" },
    el("h3", {}, run.label || settingText(run.axes, shown)), close),
  record.command ? el("p", { class: "command" }, el("code", {}, record.command), copy) : "",
  el("dl", { class: "facts" }, rows.map(([name, value]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
  dialog.showModal();
  if (record.series && record.series.t_s && record.series.t_s.length) {
    const node = seriesPlot(run);
    dialog.append(node);
    node.plot.draw();
  } else {
    dialog.append(el("p", { class: "note" }, "The observer recorded no series for this run."));
  }
}

function seriesPlot(run) {
  const { series, observed } = run.record;
  const kinds = [
    ["memory_bytes", "memory"], ["utilisation", "utilisation, %"], ["power_w", "power, W"],
    ["clock_mhz", "clock, MHz"],
  ].filter(([key]) => series[key] && series[key].some((v) => v != null));
  const unit = unitFor(series.memory_bytes || [0]);
  const source = observed ? `${observed.source}, every ${observed.interval_ms} ms` : "";
  return plot({
    name: slug("series", run.id),
    title: "Observations",
    context: source,
    height: kinds.length * 130,
    rows: () => series.t_s.map((t, i) => ({ t_s: t,
      ...Object.fromEntries(kinds.map(([key]) => [key, series[key][i]])) })),
    spec: ({ width, colours }) => ({
      vconcat: kinds.map(([key, title], i) => ({
        width: width - 80,
        height: 90,
        data: { values: series.t_s.map((t, j) => ({ seconds: t,
          value: series[key][j] == null ? null : series[key][j] / (key === "memory_bytes" ? unit.bytes : 1),
          text: key === "memory_bytes" && series[key][j] != null
            ? bytesText(series[key][j]) : String(series[key][j]) })) },
        mark: { type: "area", line: { strokeWidth: 1.5, color: colours.colours[i] },
          color: colours.colours[i], fillOpacity: 0.18, clip: true },
        params: [{ ...ZOOM, name: `zoom${i}`, select: { ...ZOOM.select, encodings: ["x"] } }],
        encoding: {
          x: { field: "seconds", type: "quantitative", scale: { nice: false },
            title: i + 1 === kinds.length ? "s" : null,
            axis: { tickCount: Math.floor(width / 70) } },
          y: { field: "value", type: "quantitative", title,
            scale: { zero: key !== "clock_mhz" }, axis: { tickCount: 4,
              ...(key === "memory_bytes" ? { labelExpr: unitLabel(unit, false) } : {}) } },
          tooltip: tips("seconds", "text"),
        },
      })),
      resolve: { scale: { x: "shared" } },
      spacing: 8,
    }),
  });
}
