// Peak against time of settings with the same work, with and without recomputation in
// one
// panel.

const wayName = (way) => (way === "none" ? "without recomputation"
  : way === "planned" ? "planned for a budget" : `recomputation: ${way}`);

/** What distinguishes a point from the other points of its work. */
function pointName(p, points) {
  const varies = (axis) => new Set(points.map((q) => q.axes[axis])).size > 1;
  const ways = new Set(points.map((q) => q.axes.recompute)).size;
  const words = [];
  if (varies("batch")) words.push(batchText(p.axes));
  for (const axis of TECHNIQUE_AXES) if (varies(axis)) words.push(p.axes[axis]);
  if (p.axes.memory != null) words.push(`in ${p.axes.memory}`);
  else if (words.length === 0 || (ways > 2 && p.axes.recompute !== "none")) words.push(p.axes.recompute);
  return words.join(", ");
}

function pointLabel(p, points, base, pick) {
  const name = pointName(p, points);
  if (p === base) return name === "none" ? "baseline" : `baseline ${name}`;
  return p === pick ? `use ${name}` : name;
}

function tradeoffRows({ points, base, pick }, unit) {
  const ms = (speed) => 1000 / speed;
  return points.map((p) => {
    const speeds = p.ranges.samples_per_s;
    return {
      id: p.runs[0].id,
      x: p.peak / unit.bytes,
      y: ms(p.samples_per_s),
      ...(speeds.n > 1 ? { low: ms(speeds.max), high: ms(speeds.min) } : {}),
      way: wayName(p.axes.recompute),
      batch: p.axes.batch,
      // Lines connect micro-batches of one kind; every budget of a plan is a point of its own.
      line: p.axes.memory != null ? JSON.stringify(p.axes)
        : JSON.stringify([p.axes.recompute, ...TECHNIQUE_AXES.map((axis) => p.axes[axis])]),
      role: p === pick ? "recommended" : p === base ? "baseline" : "",
      label: pointLabel(p, points, base, pick),
      setting: settingText(p.axes, varyingAxes(points)),
      peak: bytesText(p.peak),
      "time per sample": millisecondsText(ms(p.samples_per_s)),
      dataset: p.dataset == null ? "" : bytesText(p.dataset),
      "what sets the peak": momentText(p.peak_at) ?? "",
      warning: p.warnings.join("; "),
    };
  });
}

const LIMIT_TEXT = `${moreText(MOST_TIME - 1)} time than the baseline`;

/** The label of the limit: at the right end of its line, or at the left if a point is there. */
function limitBox(points, y, width) {
  const wide = CHARACTER * LIMIT_TEXT.length;
  const box = (left) => ({ left, right: left + wide, top: y - 16, bottom: y });
  const covers = (found) => points.some((p) => p.x > found.left - POINT && p.x < found.right + POINT &&
    p.y > found.top - POINT && p.y < found.bottom + POINT);
  const right = { ...box(width - wide), align: "right" };
  const left = { ...box(0), align: "left" };
  return covers(right) && !covers(left) ? left : right;
}

/** {labels, limit}: the labels of the points and of the limit, in pixels. The recommended
 *  setting and the baseline come first. */
function tradeoffLabels(rows, most, limit, width, height) {
  const order = ["recommended", "baseline", ""];
  const pixels = (ms) => height - ms / most.y * height;
  const points = rows.map((row) => ({ ...row, value: { x: row.x, y: row.y }, must: row.role !== "",
    x: row.x / most.x * width, y: pixels(row.y) }))
    .sort((a, b) => order.indexOf(a.role) - order.indexOf(b.role));
  const lines = [...groupBy(points, (p) => p.line).values()].flatMap((own) => {
    const sorted = [...own].sort((a, b) => a.batch - b.batch);
    return sorted.slice(1).map((p, i) => [sorted[i], p]);
  });
  for (const p of points.filter((row) => row.low != null)) {
    lines.push([{ x: p.x, y: pixels(p.low) }, { x: p.x, y: pixels(p.high) }]);
  }
  const y = pixels(limit);
  if (y <= 0) return { labels: placeLabels(points, { width, height, lines, boxes: [] }), limit: null };
  lines.push([{ x: 0, y }, { x: width, y }]);
  const box = limitBox(points, y, width);
  return { labels: placeLabels(points, { width, height, lines, boxes: [box] }), limit: box };
}

function tradeoffSpec(verdict, { width, narrow, colours }) {
  const unit = unitFor(verdict.points.map((p) => p.peak));
  const rows = tradeoffRows(verdict, unit);
  const plotWidth = width - 80;
  const height = narrow ? 230 : 300;
  const most = { x: Math.max(...rows.map((r) => r.x)) * 1.08,
    y: Math.max(...rows.map((r) => r.high ?? r.y)) * 1.07 };
  const limit = MOST_TIME * 1000 / verdict.base.samples_per_s;
  const { labels, limit: text } = tradeoffLabels(rows, most, limit, plotWidth, height);
  const x = { field: "x", type: "quantitative", title: "peak memory",
    scale: { domain: [0, most.x], nice: false },
    axis: { labelExpr: unitLabel(unit, false), tickCount: Math.floor(plotWidth / 90) } };
  const y = { field: "y", ...timeAxis("time per sample, ms", rows.map((r) => r.high ?? r.y)) };
  const ways = valuesOf(verdict.points, "recompute").map(wayName);
  const color = { field: "way", type: "nominal", sort: ways, title: null,
    scale: { domain: ways }, legend: { columns: legendColumns(ways, width), symbolOpacity: 1 } };
  return {
    data: { values: rows },
    width: plotWidth,
    height,
    layer: [
      ...(text ? limitLayers(limit, text.align, colours) : []),
      { mark: { type: "line", strokeWidth: 1.5, opacity: 0.55, clip: true },
        encoding: { x, y, color, detail: { field: "line" }, order: { field: "batch" } } },
      repeatBars(x, y, color),
      { transform: [{ filter: "datum.role !== ''" }], mark: { type: "point", filled: false, size: 230,
        strokeWidth: 2, color: colours.ink, clip: true }, encoding: { x, y,
        strokeDash: { condition: { test: "datum.role === 'baseline'", value: [3, 2] }, value: [1, 0] } } },
      ...runPoints({}, { x, y, color, tooltip: tips("setting", "peak", "dataset", "time per sample",
        "what sets the peak", "warning") }, 70),
      ...labels.map((label) => ({ data: { values: [label.value] },
        mark: { type: "text", text: label.label, align: label.align, baseline: "middle",
          dx: label.dx, dy: label.dy, clip: true, color: label.role ? colours.ink : colours.quiet,
          fontWeight: label.role === "recommended" ? 700 : 400, fontSize: 11 },
        encoding: { x, y } })),
    ],
  };
}

/** The line above which no setting is recommended. */
function limitLayers(limit, align, colours) {
  const y = { field: "limit", type: "quantitative" };
  const data = { values: [{ limit }] };
  return [
    { data, mark: { type: "rule", strokeDash: [2, 4], color: colours.quiet, clip: true }, encoding: { y } },
    { data, mark: { type: "text", align, baseline: "bottom", dx: align === "left" ? 4 : -4, dy: -2,
      fontSize: 10, text: LIMIT_TEXT }, encoding: { y, x: { value: align === "left" ? 0 : "width" } } },
  ];
}

const tradeoffCsv = ({ points, base, pick }) => points.map((p) => ({
  ...caseColumns(p.axes),
  role: p === pick ? "recommended" : p === base ? "baseline" : "",
  peak_bytes: p.peak,
  dataset_bytes: p.dataset,
  samples_per_s: p.samples_per_s,
  samples_per_s_low: repeatRange(p, "samples_per_s").low,
  samples_per_s_high: repeatRange(p, "samples_per_s").high,
  repeats: p.runs.length,
  warnings: p.warnings.join("; "),
}));
