// Memory, utilisation and time by batch and accumulation, with and without
// recomputation
// side by side, for each device, model, optimizer and number of ranks.

const MEMORY_KINDS = {
  peak: "peak of tensors",
  kept: "kept after the forward",
  reserved: "reserved by the allocator",
  seen: "measured by the observer, minus its baseline",
};
let memoryKind = "peak";

const wayText = (way) => (way === "none" ? "without recomputation" : `with recomputation: ${way}`);

function gridView(study, runs, points, rerender) {
  const node = el("div", {});
  const kinds = Object.keys(MEMORY_KINDS).filter((kind) => points.some((p) => p[kind] != null));
  if (!kinds.includes(memoryKind)) memoryKind = kinds[0] || "peak";
  const choose = el("select", { "aria-label": "Memory shown", class: "memory-kind",
    onchange: (event) => {
      memoryKind = event.target.value;
      rerender();
    } }, kinds.map((kind) => el("option", { value: kind, selected: kind === memoryKind },
    MEMORY_KINDS[kind])));
  node.append(el("p", { class: "choose" }, el("label", {}, "Memory shown: ", choose)));
  const models = valuesOf(points, "model");
  const numbers = valuesOf(points, "ranks");
  for (const device of valuesOf(points, "device")) {
    for (const model of models) {
      for (const optimizer of valuesOf(points, "optimizer")) {
        for (const ranks of numbers) {
          const mine = (item) => item.axes.device === device && item.axes.model === model &&
            item.axes.optimizer === optimizer && item.axes.ranks === ranks;
          const here = points.filter(mine);
          if (here.length === 0) continue;
          const size = sizeAxis(points.filter((p) => p.axes.model === model));
          const among = numbers.length > 1 ? [valueText("ranks", ranks)] : [];
          node.append(el("h3", {},
            [device, ...(models.length > 1 ? [model] : []), optimizer, ...among].join(" · ")),
          gridPlots({ study, size, device, model, optimizer, among,
            points: here, runs: runs.filter(mine) }));
        }
      }
    }
  }
  return node;
}

function gridPlots(grid) {
  const { study, size, device, model, optimizer, among, points } = grid;
  const words = [model, optimizer, ...among, device].join(", ");
  const name = (what) => slug(study.key, what, device, model, optimizer, ...among);
  const figures = [
    plot({
      name: name("memory"),
      title: "Memory against micro-batch",
      context: words,
      note: memoryKind === "peak" && grid.runs.some((run) => run.status !== "done")
        ? "A cross is an unfinished run (out of memory, failed or skipped), at its " +
          "predicted peak." : null,
      height: 330,
      spec: (page) => memorySpec(grid, page),
      rows: () => gridCsv(lineRows(points, [size, "recompute", "batch"], memoryKind), `${memoryKind}_bytes`),
    }),
  ];
  if (points.some((p) => p.utilisation != null)) {
    figures.push(plot({
      name: name("utilisation"),
      title: "Utilisation against micro-batch",
      context: words,
      note: utilisationNote(points),
      height: 330,
      spec: (page) => utilisationSpec(grid, page),
      rows: () => gridCsv(lineRows(points, [size, "recompute", "batch"], "utilisation"), "utilisation"),
    }));
  }
  for (const value of valuesOf(points, size)) {
    const here = points.filter((p) => p.axes[size] === value && p.epoch_s != null);
    if (here.length === 0) continue;
    figures.push(plot({
      name: name(`time-${value}`),
      title: `Time per epoch at ${valueText(size, value)}`,
      context: words,
      note: here.some((p) => p.runs.length > 1) ? "Vertical bars show the range of the repeats." : null,
      height: 330,
      spec: (page) => timeSpec(here, page),
      rows: () => gridCsv(lineRows(here, ["recompute", "batch", "accumulate"], "epoch_s"), "epoch_s"),
    }));
  }
  return el("div", { class: "plots" }, figures);
}

/** One panel per recomputation strategy, with shared axes. */
function sideBySide(points, page, layers) {
  const ways = valuesOf(points, "recompute").map(wayText);
  const size = facetSize(page, ways.length);
  return {
    columns: size.columns,
    facet: { field: "way", type: "nominal", title: null, sort: ways,
      header: { title: null } },
    spec: { width: size.width, height: 210, layer: layers },
    spacing: { row: 16, column: 16 },
  };
}

function linesOf(encoding, bars = false) {
  const { shape, tooltip, ...line } = encoding;
  return [
    { mark: { type: "line", clip: true }, encoding: { ...line, tooltip }, params: [ZOOM] },
    { mark: { type: "point", clip: true }, encoding },
    ...(bars ? [repeatBars(line.x, line.y, line.color)] : []),
  ];
}

/** The lines of a plot for CSV: axes, value, range of the repeats and number of cases. */
function gridCsv(rows, name) {
  return rows.map(({ value, n, low, high, ...axes }) => ({ ...axes, [name]: value,
    ...(low == null ? {} : { [`${name}_low`]: low, [`${name}_high`]: high }), cases: n }));
}

/** The meaning of utilisation depends on its source. */
function utilisationNote(points) {
  const sources = new Set(points.flatMap((p) => p.runs)
    .map((run) => run.record.observed && run.record.observed.source));
  return sources.has("nvml")
    ? "The fraction of the training time in which the GPU ran at least one kernel (NVML). 100 % means " +
      "that it never waited for the CPU, not that all of its units were busy."
    : "The fraction of the CPU time of all cores that the process used during the training. Below 100 %, cores " +
      "waited for data or memory, or the work was too small to distribute.";
}

function memorySpec(grid, page) {
  const { size, points } = grid;
  const values = valuesOf(points, size).map((v) => valueText(size, v));
  const found = lineRows(points, [size, "recompute", "batch"], memoryKind);
  const unfinished = memoryKind !== "peak" ? [] : grid.runs.filter((run) =>
    run.status !== "done" && run.axes.batch != null && run.record.predicted &&
    run.record.predicted.peak_bytes > 0);
  const unit = unitFor([...found.map((row) => row.value),
    ...unfinished.map((run) => run.record.predicted.peak_bytes)]);
  const rows = found.map((row) => ({
    batch: row.batch,
    line: valueText(size, row[size]),
    way: wayText(row.recompute),
    y: row.value / unit.bytes,
    memory: bytesText(row.value),
    "micro-batch": row.batch,
    runs: row.n,
  }));
  const unfit = unfinished.map((run) => ({
    batch: run.axes.batch,
    way: wayText(run.axes.recompute),
    line: valueText(size, run.axes[size]),
    y: run.record.predicted.peak_bytes / unit.bytes,
    predicted: bytesText(run.record.predicted.peak_bytes),
    "micro-batch": run.axes.batch,
    status: run.status,
  }));
  const batches = [...new Set([...rows, ...unfit].map((row) => row.batch))].sort((a, b) => a - b);
  const x = { field: "batch", ...powersAxis("micro-batch", batches) };
  const y = { field: "y", ...memoryAxis(MEMORY_KINDS[memoryKind], unit) };
  const layers = linesOf({ x, y, ...byColourAndShape("line", axisName(size), values),
    tooltip: tips("line", "way", "micro-batch", "memory", "runs") });
  if (unfit.length) {
    layers.push({
      transform: [{ filter: "isValid(datum.predicted)" }],
      mark: { type: "point", clip: true, filled: false, size: 55, strokeWidth: 1.6,
        shape: "M-1,-1L1,1M-1,1L1,-1", color: page.colours.warn },
      encoding: { x, y, tooltip: tips("status", "line", "way", "micro-batch", "predicted") },
    });
    for (const layer of layers.slice(0, 2)) {
      layer.transform = [{ filter: "!isValid(datum.predicted)" }];
    }
  }
  return { data: { values: [...rows, ...unfit] }, ...sideBySide(points, page, layers) };
}

function utilisationSpec(grid, page) {
  const { size, points } = grid;
  const values = valuesOf(points, size).map((v) => valueText(size, v));
  const rows = lineRows(points, [size, "recompute", "batch"], "utilisation").map((row) => ({
    batch: row.batch,
    line: valueText(size, row[size]),
    way: wayText(row.recompute),
    percent: row.value,
    utilisation: `${figures3(row.value)}${NO_BREAK}%`,
    "micro-batch": row.batch,
    runs: row.n,
  }));
  return {
    data: { values: rows },
    ...sideBySide(points, page, linesOf({
      x: { field: "batch", ...powersAxis("micro-batch", valuesOf(points, "batch")) },
      y: { field: "percent", type: "quantitative", title: "average utilisation, %",
        scale: { domain: [0, 103], nice: false }, axis: { values: [0, 25, 50, 75, 100] } },
      ...byColourAndShape("line", axisName(size), values),
      tooltip: tips("line", "way", "micro-batch", "utilisation", "runs"),
    })),
  };
}

function timeSpec(points, page) {
  const batches = valuesOf(points, "batch");
  const rows = lineRows(points, ["recompute", "batch", "accumulate"], "epoch_s").map((row) => ({
    accumulate: row.accumulate,
    line: String(row.batch),
    way: wayText(row.recompute),
    seconds: row.value,
    low: row.low,
    high: row.high,
    "time per epoch": secondsText(row.value),
    "micro-batch": row.batch,
    accumulation: row.accumulate,
    runs: row.n,
  }));
  return {
    data: { values: rows },
    ...sideBySide(points, page, linesOf({
      x: { field: "accumulate", ...powersAxis("accumulation", valuesOf(points, "accumulate")) },
      y: { field: "seconds", ...timeAxis("time per epoch, s", rows.map((row) => row.high ?? row.seconds)) },
      ...byColourAndShape("line", "micro-batch", batches.map(String)),
      tooltip: tips("way", "micro-batch", "accumulation", "time per epoch", "runs"),
    }, rows.some((row) => row.low != null))),
  };
}
