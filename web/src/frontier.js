// Time against memory: one point per case, and a line through the Pareto-optimal ones.

function frontierView(study, points) {
  const usable = points.filter((p) => p.peak != null && p.samples_per_s != null);
  const node = el("div", { class: "plots" });
  // One plot per size: different sizes cannot share a time axis that starts at zero.
  for (const group of frontGroups(usable)) {
    if (group.length < 2) continue;
    const { device, model } = group[0].axes;
    const size = sizeText(group[0].axes);
    node.append(plot({
      name: slug(study.key, "frontier", device, model, size),
      title: `Time against memory${size ? ` at ${size}` : ""}`,
      context: `${model}, ${device}`,
      note: frontierNote(group),
      height: 400,
      spec: (page) => frontierSpec(group, page),
      rows: () => frontierCsv(group),
      onclick: (datum) => datum && datum.id && openRun(datum.id),
    }));
  }
  if (node.childElementCount === 1) node.classList.add("wide");
  return node;
}

function frontierNote(points) {
  return ["Lower and further left is better. The line connects the Pareto-optimal settings.",
    points.some((p) => p.runs.length > 1) ? "Vertical bars show the range of the repeats." : "",
    points.some((p) => p.axes.memory != null) ? "Vertical dotted lines are budgets." : "",
    points.some((p) => p.warnings.length) ? "Hollow points have warnings." : ""].filter(Boolean).join(" ");
}

function frontierCsv(points) {
  const best = paretoOf(points);
  return points.map((p) => ({ ...caseColumns(p.axes), label: p.label, peak_bytes: p.peak,
    dataset_bytes: p.dataset, samples_per_s: p.samples_per_s,
    samples_per_s_low: repeatRange(p, "samples_per_s").low,
    samples_per_s_high: repeatRange(p, "samples_per_s").high,
    repeats: p.runs.length, on_the_line: best.includes(p), warnings: p.warnings.join("; ") }));
}

function frontierRow(p, unit, shown) {
  const { low, high } = repeatRange(p, "samples_per_s");
  return {
    id: p.runs[0].id,
    way: p.axes.recompute ?? "–",
    system: p.axes.system,
    optimizer: p.axes.optimizer,
    x: p.peak / unit.bytes,
    ms: 1000 / p.samples_per_s,
    ...(low == null ? {} : { low: 1000 / high, high: 1000 / low }),
    setting: [p.label, settingText(p.axes, shown)].filter(Boolean).join(": "),
    peak: bytesText(p.peak),
    dataset: p.dataset == null ? "" : bytesText(p.dataset),
    "time per sample": millisecondsText(1000 / p.samples_per_s),
    "what sets the peak": momentText(p.peak_at) ?? "",
    warning: p.warnings.join("; "),
  };
}

/** Requested budgets as vertical rules with labels. */
function budgetLayers(points, unit, x, colours) {
  const budgets = [...new Set(points.map((p) => p.axes.memory && parseBytes(p.axes.memory))
    .filter(Boolean))].map((bytes) => ({ x: bytes / unit.bytes, budget: bytesText(bytes) }));
  if (budgets.length === 0) return [];
  return [
    { data: { values: budgets }, mark: { type: "rule", strokeDash: [2, 4], color: colours.quiet },
      encoding: { x, tooltip: tips("budget") } },
    { data: { values: budgets }, mark: { type: "text", align: "right", baseline: "top", dx: -3, dy: 4,
      fontSize: 10, angle: 270 }, encoding: { x, y: { value: 0 }, text: { field: "budget" } } },
  ];
}

function frontierSpec(points, { width, narrow, colours }) {
  const ways = valuesOf(points, "recompute");
  const unit = unitFor(points.map((p) => p.peak));
  const shown = varyingAxes(points);
  const rows = points.map((p) => frontierRow(p, unit, shown));
  const front = paretoOf(points).map((p) => frontierRow(p, unit, shown));
  const x = { field: "x", ...memoryAxis("peak of tensors", unit) };
  const y = { field: "ms", ...timeAxis("time per sample, ms", rows.map((row) => row.high ?? row.ms)) };
  const color = { field: "way", type: "nominal", sort: ways, title: "recomputation",
    scale: { domain: ways }, legend: { columns: legendColumns(ways, width) } };
  // The shape distinguishes systems or, if there is only one, optimizers.
  const axis = ["system", "optimizer"].find((name) => valuesOf(points, name).length > 1);
  const kinds = axis ? valuesOf(points, axis) : [];
  const shape = !axis ? null : { field: axis, type: "nominal", sort: kinds, title: axisName(axis),
    scale: { domain: kinds }, legend: { columns: legendColumns(kinds, width) } };
  return {
    width: width - 76,
    height: narrow ? 260 : 300,
    layer: [
      ...budgetLayers(points, unit, x, colours),
      { data: { values: front }, mark: { type: "line", interpolate: "step-after", strokeWidth: 1.5,
        opacity: 0.8, clip: true, color: colours.quiet }, encoding: { x, y } },
      ...(rows.some((row) => row.low != null)
        ? [{ data: { values: rows }, ...repeatBars(x, y, color) }] : []),
      ...runPoints({ data: { values: rows } }, { x, y, color, ...(shape ? { shape } : {}),
        tooltip: tips("setting", "peak", "dataset", "time per sample", "what sets the peak",
          "warning") }, 55),
    ],
  };
}
