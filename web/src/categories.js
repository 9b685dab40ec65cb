// Memory at the peak by category, and the operation at which the peak occurs.

const CATEGORIES = ["parameters", "gradients", "optimizer", "activations", "workspace", "data"];
const allBars = new Set();

/** Keeps one setting per size and optimizer if there are too many: the one with the highest
 *  peak without recomputation, together with its variants that recompute. */
function chosenBars(points) {
  const pairing = SETTING_AXES.filter((axis) => axis !== "batch" && axis !== "accumulate");
  const alike = [...groupBy(points, (p) => axesKey(p.axes, pairing)).values()];
  const kinds = groupBy(alike.filter((group) => group.some((p) => p.axes.recompute === "none")),
    (group) => axesKey(group[0].axes, SETTING_AXES));
  return [...kinds.values()].flatMap((groups) => {
    const complete = groups.filter((group) => group.length > 1);
    const peakOf = (group) => Math.max(...group.map((p) => p.peak ?? 0));
    return (complete.length ? complete : groups)
      .reduce((a, b) => (peakOf(b) > peakOf(a) ? b : a));
  });
}

function categoriesView(study, points, rerender) {
  const usable = points.filter((p) => p.memory);
  const node = el("div", { class: "plots wide" });
  for (const device of valuesOf(usable, "device")) {
    const here = usable.filter((p) => p.axes.device === device);
    const key = `${study.key} ${device}`;
    const many = here.length > 24;
    const bars = many && !allBars.has(key) ? chosenBars(here) : here;
    const shown = varyingAxes(here);
    const order = (p) => [p.axes.model, sizeText(p.axes), p.axes.optimizer, p.axes.precision];
    // Named steps keep their order.
    if (!bars.some((p) => p.label)) bars.sort((a, b) => compareNatural(order(a).join(), order(b).join()) ||
      b.axes.batch - a.axes.batch || (a.axes.accumulate ?? 1) - (b.axes.accumulate ?? 1) ||
      (b.axes.recompute === "none") - (a.axes.recompute === "none") ||
      compareNatural(a.axes.recompute, b.axes.recompute));
    node.append(plot({
      name: slug(study.key, "categories", device),
      title: "Memory at the peak by category",
      context: device,
      height: 70 + bars.length * 20,
      spec: (page) => categoriesSpec(bars, shown, page),
      rows: () => bars.map((p) => ({ ...caseColumns(p.axes), label: p.label,
        ...Object.fromEntries(CATEGORIES.map((c) => [`${c}_bytes`, p.memory[c] || 0])),
        peak_bytes: p.peak, dataset_bytes: p.dataset, set_by: momentText(p.peak_at) })),
    }));
    if (many) {
      node.append(el("p", { class: "note" },
        allBars.has(key) ? `All ${here.length} settings. `
          : `For each size, the setting with the highest peak: ${bars.length} of ${here.length} settings. `,
        el("button", { type: "button", class: "small", onclick: () => {
          if (!allBars.delete(key)) allBars.add(key);
          rerender();
        } }, allBars.has(key) ? "Fewer" : "All")));
    }
  }
  return node;
}

function categoriesSpec(bars, shown, { width, narrow, colours }) {
  const names = bars.map((p) => p.label ? `${p.label}${shown.includes("system") ? ` · ${p.axes.system}` : ""}`
    : settingText(p.axes, shown));
  const labels = names.map((name, i) => (names.indexOf(name) === i ? name : `${name} (${i + 1})`));
  const total = (p) => CATEGORIES.reduce((sum, c) => sum + (p.memory[c] || 0), 0);
  const unit = unitFor(bars.map(total));
  const rows = bars.flatMap((p, i) => CATEGORIES.filter((c) => p.memory[c] > 0).map((category) => ({
    bar: labels[i],
    category,
    order: CATEGORIES.indexOf(category),
    x: p.memory[category] / unit.bytes,
    memory: bytesText(p.memory[category]),
    "what sets the peak": momentText(p.peak_at) ?? "",
  })));
  const totals = bars.map((p, i) => ({
    bar: labels[i],
    x: total(p) / unit.bytes,
    text: momentText(p.peak_at) ?? "",
  }));
  const most = Math.max(...totals.map((t) => t.x));
  // Next to the bars on a wide page; above them on a phone.
  const labelWidth = narrow ? 0 : Math.min(260, 8 + 6.3 * Math.max(...labels.map((l) => l.length)));
  const room = narrow ? 1.02 : 1.28;
  const y = { field: "bar", type: "nominal", sort: labels, title: null,
    axis: narrow ? null : { labelLimit: labelWidth, labelOverlap: false, ticks: false, domain: false } };
  const x = { field: "x", type: "quantitative", title: "memory at the peak" };
  const text = narrow
    ? { data: { values: totals.map((t) => ({ ...t, text: t.text ? `${t.bar}: ${t.text}` : t.bar })) },
      mark: { type: "text", align: "left", dy: -8, limit: width - 20, color: colours.ink },
      encoding: { y, x: { value: 0 }, text: { field: "text" } } }
    : { data: { values: totals }, mark: { type: "text", align: "left", dx: 5,
      limit: (width - labelWidth - 30) * (1 - 1 / room) + 40 },
    encoding: { y, x, text: { field: "text" } } };
  return {
    width: width - labelWidth - 30,
    height: { step: narrow ? 34 : 19 },
    layer: [
      { data: { values: rows }, mark: { type: "bar", height: narrow ? 11 : 14, yOffset: narrow ? 7 : 0 },
        encoding: {
          y,
          x: { ...x, stack: "zero", scale: { domain: [0, most * room], nice: false },
            axis: { labelExpr: unitLabel(unit, false), tickCount: narrow ? 3 : 6 } },
          color: { field: "category", type: "nominal", sort: CATEGORIES, title: null,
            scale: { domain: CATEGORIES, range: [...colours.colours.slice(0, 5), colours.colours[6]] },
            legend: { columns: narrow ? 3 : 6 } },
          order: { field: "order", type: "quantitative" },
          tooltip: tips("bar", "category", "memory", "what sets the peak"),
        } },
      text,
    ],
  };
}
