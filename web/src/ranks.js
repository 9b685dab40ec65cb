// What each of several ranks holds and how long an update takes, predicted and measured.

function ranksView(study, computed, at) {
  const node = el("div", {});
  computed.tables.forEach((found, i) => {
    const words = [found.axes.model, sizeText(found.axes), found.axes.optimizer]
      .filter(Boolean).join(", ");
    node.append(el("h3", {}, `${found.axes.device} · ${words}`),
      ranksTable(found.rows, `${at}.tables.${i}`),
      el("p", { class: "note" }, "Memory is that of one rank at its peak. Exchanged: gradients " +
        "and parameters in the collectives of one update. Predicted before the first update."),
      el("div", { class: "plots" },
        ranksPlot(study, found, words, "peak", "Memory of a rank", bytesText),
        ranksPlot(study, found, words, "step_ms", "Time of an update", millisecondsText)));
  });
  return node;
}

function ranksTable(rows, at) {
  const columns = [
    ["parameters", "parameters", "bytes"],
    ["gradients", "gradients", "bytes"],
    ["optimizer", "optimizer", "bytes"],
    ["peak", "peak", "bytes"],
    ["peak_predicted", "predicted", "bytes"],
    ["peak_ratio", "× measured", "number"],
    ["step_ms", "update", "ms"],
    ["step_predicted", "predicted", "ms"],
    ["step_ratio", "× measured", "number"],
    ["exchanged", "exchanged", "bytes"],
  ].filter(([key]) => rows.some((row) => row[key] != null));
  return table([{ title: "ranks", number: true }, { title: "divided" }, { title: "budget" },
    { title: "micro-batches" }, ...columns.map(([, title]) => ({ title, number: true }))],
  rows.map((row, i) => [row.ranks, row.shard, row.memory ?? "–",
    `${row.batch} × ${row.accumulate}`,
    ...columns.map(([key, , format]) => figure(`${at}.rows.${i}.${key}`, row[key], format))]));
}

/** Bars of all rows, measured and predicted. */
function ranksPlot(study, { axes, rows }, words, key, title, text) {
  const names = ["measured", "predicted"];
  const unit = key === "peak" ? unitFor(rows.map((row) => row.peak ?? 0)) : { bytes: 1 };
  const other = key === "peak" ? "peak_predicted" : "step_predicted";
  const label = (row) => [`${row.ranks} ${row.ranks === 1 ? "rank" : "ranks"}`, row.shard,
    row.memory].filter(Boolean).join(", ");
  const labels = rows.map(label);
  const values = rows.flatMap((row) => [[key, names[0]], [other, names[1]]]
    .filter(([field]) => row[field] != null)
    .map(([field, kind]) => ({ case: label(row), kind, value: row[field] / unit.bytes,
      figure: text(row[field]) })));
  return plot({
    name: slug(study.key, key === "peak" ? "memory" : "time", "by-ranks", axes.device, axes.model),
    title,
    context: `${words}, ${axes.device}`,
    height: 60 + rows.length * 30,
    rows: () => rows.map((row) => ({ ...caseColumns(axes), ...row })),
    spec: ({ width }) => {
      const room = Math.min(220, width * 0.4);
      return {
        data: { values },
        width: width - room - 40,
        height: { step: 11 },
        mark: "bar",
        encoding: {
          y: { field: "case", type: "nominal", sort: labels, title: null,
            scale: { paddingInner: 0.25 }, axis: { labelLimit: room + 20, labelOverlap: false } },
          yOffset: { field: "kind", type: "nominal", sort: names },
          x: { field: "value", type: "quantitative",
            title: key === "peak" ? "peak memory" : "time of an update, ms",
            axis: key === "peak" ? { labelExpr: unitLabel(unit, false), tickCount: 5 } : { tickCount: 5 } },
          color: { field: "kind", type: "nominal", sort: names, title: null,
            scale: { domain: names } },
          tooltip: tips("case", "kind", "figure"),
        },
      };
    },
  });
}
