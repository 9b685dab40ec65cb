// Time against memory: every run a point, and the line that none is below.

function frontierView(study, points) {
  const usable = points.filter((p) => p.peak != null && p.samples_per_s != null);
  const node = el("div", { class: "plots wide" });
  for (const device of valuesOf(usable, "device")) {
    for (const model of valuesOf(usable, "model")) {
      const here = usable.filter((p) => p.axes.device === device && p.axes.model === model);
      if (here.length < 2) continue;
      node.append(plot({
        name: slug(study.study, "frontier", device, model),
        title: "Time against memory",
        context: `${model}, ${device}`,
        note: "Lower and further left is better. The lines join the runs that no other beats " +
          "in both" + (here.some((p) => p.axes.memory != null)
          ? "; upright rules are budgets that were asked for." : "."),
        height: 420,
        spec: (page) => frontierSpec(here, page),
        onclick: (datum) => datum && datum.id && openRun(datum.id),
      }));
    }
  }
  return node;
}

function frontierSpec(points, { width, narrow, colours }) {
  const sizes = [...new Set(points.map((p) => sizeText(p.axes)))].sort(compareNatural);
  const bySize = sizes.length > 1;
  const ways = valuesOf(points, "recompute");
  const systems = valuesOf(points, "system");
  const shown = varyingAxes(points);
  const unit = unitFor(points.map((p) => p.peak));
  const rowOf = (p) => ({
    id: p.runs[0].id,
    size: sizeText(p.axes),
    way: p.axes.recompute ?? "–",
    system: p.axes.system,
    x: p.peak / unit.bytes,
    ms: 1000 / p.samples_per_s,
    setting: settingText(p.axes, shown),
    peak: bytesText(p.peak),
    "a sample": millisecondsText(1000 / p.samples_per_s),
    "what sets the peak": momentText(p.peak_at) ?? "",
  });
  const rows = points.flatMap((p) => p.runs.map((run) => ({
    ...rowOf({ ...p, ...run.figures, peak_at: run.peak_at }),
    id: run.id,
  }))).filter((row) => Number.isFinite(row.x) && Number.isFinite(row.ms));
  const front = frontGroups(points).flatMap((group) => paretoOf(group).map(rowOf));
  const budgets = [...new Set(points.map((p) => p.axes.memory && parseBytes(p.axes.memory))
    .filter(Boolean))].map((bytes) => ({ x: bytes / unit.bytes, budget: bytesText(bytes) }));
  const x = { field: "x", ...memoryAxis("peak of tensors", unit) };
  const y = { field: "ms", type: "quantitative", title: "time a sample, ms",
    scale: bySize && logScale ? { type: "log", nice: false, padding: 12 } : { zero: false, padding: 12 },
    axis: { format: "~r", tickCount: 6 } };
  const colour = bySize ? ["size", sizes] : ["way", ways];
  const color = { field: colour[0], type: "nominal", sort: colour[1],
    title: bySize ? "size" : "recomputation", scale: { domain: colour[1] },
    legend: { columns: narrow ? 3 : 0 } };
  // Of several systems the shape tells which it was.
  const shape = { ...(systems.length > 1
    ? { field: "system", sort: systems, scale: { domain: systems }, title: "system" }
    : { field: "way", sort: ways, scale: { domain: ways }, title: "recomputation" }),
  type: "nominal", legend: { columns: narrow ? 3 : 0 } };
  return {
    width: width - 76,
    height: narrow ? 280 : 340,
    layer: [
      { data: { values: budgets }, mark: { type: "rule", strokeDash: [2, 4], color: colours.quiet },
        encoding: { x, tooltip: tips("budget") } },
      { data: { values: budgets }, mark: { type: "text", align: "right",
        baseline: "top", dx: -3, dy: 4, fontSize: 10 },
        encoding: { x, y: { value: 0 }, text: { field: "budget" } } },
      { data: { values: front }, mark: { type: "line", interpolate: "step-after", strokeWidth: 1.5, opacity: 0.8, clip: true,
        ...(bySize ? {} : { color: colours.quiet }) },
      encoding: { x, y, detail: { field: "size" }, ...(bySize ? { color } : {}) } },
      { data: { values: rows }, params: [ZOOM], mark: { type: "point", clip: true, size: 55,
        opacity: 0.85, cursor: "pointer" },
      encoding: { x, y, color, shape,
        tooltip: tips("setting", "peak", "a sample", "what sets the peak") } },
    ],
  };
}
