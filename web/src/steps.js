// A sequence of techniques: BEFORE and AFTER, and all of them in a table.

function stepsView(study, computed, at) {
  const node = el("div", {});
  computed.tables.forEach((found, i) => {
    const isPublished = found.sources.some((s) => s.name === "published") && study.reference.source;
    node.append(el("div", {}, el("h3", {}, `${found.device} · ${found.model}`),
      beforeAfter(found), stepTable(found, `${at}.tables.${i}`),
      isPublished ? el("p", { class: "note" }, `Source of the published figures: ${study.reference.source}.`)
        : null,
      el("div", { class: "plots" },
        stepPlot(study, found, "peak", "Memory", bytesText),
        stepPlot(study, found, "time_s", "Time", secondsText))));
  });
  return node;
}

/** Compares two rows of one source. */
function beforeAfter({ labels, sources }) {
  const body = el("div", {});
  const select = (name, options, chosen) => el("select", { class: name, "aria-label": name,
    onchange: show }, options.map((text, i) =>
    el("option", { value: i, selected: i === chosen }, text)));
  const complete = sources.findIndex((s) => s.rows.filter((row) => row && !row.status).length > 1);
  const source = select("source", sources.map((s) => s.name), Math.max(0, complete));
  const known = sources[Math.max(0, complete)].rows;
  const last = known.reduce((found, row, i) => (row && !row.status ? i : found), 0);
  const before = select("before", labels, 0);
  const after = select("after", labels, last);
  function show() {
    const rows = sources[source.value].rows;
    const [a, b] = [rows[before.value], rows[after.value]];
    const line = (name, key, text) => [name, a && a[key] != null ? text(a[key]) : "–",
      b && b[key] != null ? text(b[key]) : "–",
      a && b && a[key] && b[key] != null ? changeText(b[key] / a[key] - 1) : "–"];
    body.replaceChildren(table([{ title: "" }, { title: "BEFORE", number: true },
      { title: "AFTER", number: true }, { title: "change", number: true }], [
      line("Time per epoch", "time_s", secondsText),
      line("Samples/s", "samples_per_s", figures3),
      line("Memory", "peak", bytesText),
    ], { class: "before-after" }));
  }
  show();
  return el("div", { class: "before-after-box" },
    el("p", { class: "choose" }, el("label", {}, "Of ", source), el("label", {}, " before ", before),
      el("label", {}, " after ", after)), body);
}

function stepTable({ labels, sources }, at) {
  const columns = [["time_s", "epoch", "seconds"], ["time_ratio", "×", "number"],
    ["samples_per_s", "samples/s", "number"], ["peak", "memory", "bytes"],
    ["peak_ratio", "×", "number"]];
  return el("div", { class: "scroll", tabindex: "0" }, el("table", { class: "steps" },
    el("thead", {},
      el("tr", {}, el("th", { rowspan: 2, scope: "col" }, "step"), sources.map((source) =>
        el("th", { colspan: columns.length, scope: "colgroup", class: "source" }, source.name))),
      el("tr", {}, sources.flatMap(() => columns.map(([, title], i) =>
        el("th", { class: `number${i === 0 ? " first" : ""}`, scope: "col" }, title))))),
    el("tbody", {}, labels.map((label, row) => el("tr", {}, el("th", { scope: "row" }, label),
      sources.flatMap((source, s) => {
        const found = source.rows[row];
        if (found && found.status) {
          return el("td", { class: "first", colspan: columns.length },
            el("span", { class: `status ${found.status}` }, STATUS_WORDS[found.status] || found.status));
        }
        return columns.map(([key, , format], i) =>
          el("td", { class: `number${i === 0 ? " first" : ""}` }, found
            ? [figure(`${at}.sources.${s}.rows.${row}.${key}`, found[key], format),
              key === "time_ratio" && found.time_noise ? noiseMark() : null] : "–"));
      }))))));
}

function stepPlot(study, found, key, title, text) {
  const names = found.sources.map((s) => s.name);
  const all = found.sources.flatMap((s) => s.rows.filter(Boolean).map((row) => row[key] ?? 0));
  const unit = key === "peak" ? unitFor(all) : { bytes: 1 };
  const values = found.sources.flatMap((source) => source.rows.flatMap((row, i) =>
    (row && row[key] != null ? [{ step: found.labels[i], source: source.name,
      value: row[key] / unit.bytes, figure: text(row[key]),
      ...(key === "time_s" && row.low != null ? { low: row.low, high: row.high } : {}) }] : [])));
  return plot({
    name: slug(study.key, key === "peak" ? "memory" : "time", "by-step", found.device, found.model),
    title: `${title} of each step`,
    context: `${found.model}, ${found.device}`,
    height: 60 + found.labels.length * 50,
    rows: () => values.map(({ value, figure: shown, ...row }) => ({ ...row,
      [key === "peak" ? "peak_bytes" : "time_s"]: value * unit.bytes })),
    spec: ({ width, colours }) => {
      const label = Math.min(240, width * 0.4);
      return {
        data: { values },
        width: width - label - 40,
        height: { step: 13 },
        encoding: {
          y: { field: "step", type: "nominal", sort: found.labels, title: null,
            scale: { paddingInner: 0.25 },
            axis: { labelExpr: wrappedLabels(found.labels, Math.floor(label / 6)),
              labelLimit: label + 20, labelOverlap: false } },
          yOffset: { field: "source", type: "nominal", sort: names },
          x: { field: "value", type: "quantitative", title: key === "peak" ? "peak memory" : "time per epoch, s",
            axis: key === "peak" ? { labelExpr: unitLabel(unit, false), tickCount: 5 } : { tickCount: 5 } },
          color: { field: "source", type: "nominal", sort: names, title: null,
            scale: { domain: names }, legend: { columns: legendColumns(names, width) } },
        },
        layer: [
          { mark: { type: "bar" }, encoding: { tooltip: tips("step", "source", "figure") } },
          ...(values.some((v) => v.low != null) ? [{
            transform: [{ filter: "isValid(datum.low)" }], mark: { type: "rule", strokeWidth: 1.5 },
            encoding: { x: { field: "low", type: "quantitative" }, x2: { field: "high" },
              color: { value: colours.ink } } }] : []),
        ],
      };
    },
  });
}
