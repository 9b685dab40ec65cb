// Memory and time by number of checkpoints, compared with published figures.

function checkpointsView(study, computed, at) {
  const node = el("div", {});
  const source = study.reference && study.reference.source;
  computed.tables.forEach((found, i) => {
    const { axes, rows } = found;
    const words = [axes.model, sizeText(axes), batchText(axes), axes.optimizer]
      .filter(Boolean).join(", ");
    node.append(el("h3", {}, `${axes.device} · ${words}`),
      checkpointTable(rows, `${at}.tables.${i}`, source),
      el("div", { class: "plots" }, checkpointPlots(study, found, words)));
  });
  return node;
}

function checkpointTable(rows, at, source) {
  const has = (key) => rows.some((row) => row[key] != null);
  const columns = [
    ["kept", "kept after the forward", "bytes"],
    ["kept_ratio", "of none", "share"],
    ["kept_published", "published", "share"],
    ["peak", "true peak", "bytes"],
    ["peak_ratio", "of none", "share"],
    ["peak_published", "published", "share"],
    ["step_ms", "time per step", "ms"],
    ["time_ratio", "× none", "number"],
    ["time_published", "published", "number"],
    ["dataset", "dataset, not in the peak", "bytes"],
  ].filter(([key]) => has(key));
  return el("div", {},
    table([{ title: "recomputation" },
      ...columns.map(([key, title]) => ({
        title: key.endsWith("_published") ? el("span", { class: "published" }, title) : title,
        number: true,
      })), { title: "what sets the peak" }],
    rows.map((row, i) => [row.recompute,
      ...columns.map(([key, , format]) => [figure(`${at}.rows.${i}.${key}`, row[key], format),
        key === "time_ratio" && row.time_noise ? noiseMark() : null,
        key === "step_ms" ? stepRange(row, `${at}.rows.${i}`) : null]),
      row.moment])),
    source ? el("p", { class: "note" }, `Source of the published figures: ${source}.`) : null);
}

/** " (4.40 s to 4.48 s)" for the repeats of a step; null if both read the same. */
function stepRange(row, at) {
  if (row.step_low == null || millisecondsText(row.step_low) === millisecondsText(row.step_high)) return null;
  return el("span", { class: "range" }, " (", figure(`${at}.step_low`, row.step_low, "ms"), " to ",
    figure(`${at}.step_high`, row.step_high, "ms"), ")");
}

function checkpointPlots(study, { axes, rows }, words) {
  const order = rows.map((row) => row.recompute);
  const kinds = (pairs) => rows.flatMap((row) => pairs
    .filter(([key]) => row[key] != null)
    .map(([key, kind, format]) => ({ recomputation: row.recompute, kind, value: row[key],
      figure: FORMATS[format](row[key]) })));
  const spec = (key, pairs, title) => ({ width, narrow }) => {
    const values = kinds(pairs);
    const named = pairs.map(([, kind]) => kind).filter((kind) => values.some((v) => v.kind === kind));
    const ends = key === "time_ratio" ? rows.filter((row) => row.time_low != null).map((row) =>
      ({ recomputation: row.recompute, kind: "measured", low: row.time_low, high: row.time_high })) : [];
    const dash = named.map((kind) => (kind.includes("published") ? [4, 3] : [1, 0]));
    const x = { field: "recomputation", type: "nominal", sort: order, title: null,
      axis: { labelAngle: narrow ? -50 : -30, labelOverlap: false } };
    const y = { field: "value", type: "quantitative", title, scale: { zero: true } };
    const color = { field: "kind", type: "nominal", title: null, sort: named,
      scale: { domain: named } };
    color.legend = { columns: legendColumns(named, width) };
    return { data: { values }, width: width - 80, height: 230, layer: [
      { mark: "line", encoding: { x, y, color, strokeDash: { field: "kind", type: "nominal",
        title: null, sort: named, scale: { domain: named, range: dash } } } },
      { mark: { type: "point" }, encoding: { x, y, color,
        shape: { field: "kind", type: "nominal", title: null, sort: named, scale: { domain: named } },
        tooltip: tips("recomputation", "kind", "figure") } },
      ...(ends.length ? [{ data: { values: ends }, ...repeatBars(x, y, color) }] : []),
    ] };
  };
  const csv = () => rows.map((row) => ({ ...caseColumns(axes), ...row }));
  const name = (what) => slug(study.key, what, axes.device, axes.model, sizeText(axes));
  return [
    plot({ name: name("memory-by-checkpoints"), title: "Memory as a fraction of none",
      context: `${words}, ${axes.device}`,
      rows: csv,
      spec: spec("memory", [["kept_ratio", "kept after the forward", "share"],
        ["kept_published", "kept, published", "share"], ["peak_ratio", "true peak", "share"],
        ["peak_published", "peak, published", "share"]], "fraction of none") }),
    plot({ name: name("time-by-checkpoints"), title: "Time per step, × none",
      context: `${words}, ${axes.device}`,
      rows: csv,
      note: rows.some((row) => row.time_low != null) ? "Vertical bars show the range of the repeats." : null,
      spec: spec("time_ratio", [["time_ratio", "measured", "number"],
        ["time_published", "published", "number"]], "× none") }),
  ];
}
