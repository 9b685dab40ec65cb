// Parts of Vega-Lite specifications shared by several plots.

/** Drag to pan, Ctrl and the wheel to zoom (the wheel alone scrolls the page), double-click to
 *  reset. */
const ZOOM = {
  name: "zoom",
  select: { type: "interval", zoom: "wheel![event.ctrlKey || event.metaKey]" },
  bind: "scales",
};

/** The unit {bytes, name} for an axis: GiB if the largest value has at least one. */
function unitFor(values) {
  const gib = Math.max(...values) >= 2 ** 30;
  return gib ? { bytes: 2 ** 30, name: "GiB" } : { bytes: 2 ** 20, name: "MiB" };
}

/** Labels of an axis in `unit`; values below one use the next smaller unit. */
function unitLabel(unit, below = true) {
  const smaller = unit.name === "GiB" ? "MiB" : "KiB";
  const plain = `format(datum.value, '~r') + ' ${unit.name}'`;
  return !below ? plain : "datum.value > 0 && datum.value < 1 ? " +
    `format(datum.value * 1024, '~r') + ' ${smaller}' : ${plain}`;
}

let logScale = true;

const powersAxis = (title, values) => ({
  type: "quantitative",
  title,
  scale: { type: "log", base: 2, nice: false, padding: 12 },
  axis: { values, format: "d", grid: false },
});

/** A memory axis in `unit`. */
const memoryAxis = (title, unit) => ({
  type: "quantitative",
  title,
  scale: logScale ? { type: "log", base: 2, nice: false, padding: 10 } : { zero: true },
  axis: { labelExpr: unitLabel(unit, logScale), tickCount: 6 },
});

const tips = (...names) => names.map((name) => ({ field: name, type: "nominal" }));

/** A label expression that wraps long names. */
function wrappedLabels(names, characters) {
  const lines = Object.fromEntries(names.map((name) => [name, name.split(" ").reduce((all, word) => {
    const last = all[all.length - 1];
    if (last && last.length + word.length < characters) all[all.length - 1] = `${last} ${word}`;
    else all.push(word);
    return all;
  }, [])]));
  return `${JSON.stringify(lines)}[datum.label]`;
}

/** The width of each of `n` plots side by side; they are stacked on a phone. */
function facetSize({ width, narrow }, n, left = 64) {
  const columns = narrow ? 1 : Math.min(n, 2);
  return { columns, width: Math.max(120, Math.floor((width - left - 24 * columns) / columns)) };
}

/** Encodes one ordered value as color and shape. */
function byColourAndShape(field, title, values) {
  return {
    color: { field, type: "nominal", title, sort: values, scale: { domain: values } },
    shape: { field, type: "nominal", title, sort: values, scale: { domain: values } },
  };
}

/** The number of legend columns such that the legend fits the plot. */
function legendColumns(labels, width) {
  const widest = 34 + 6.4 * Math.max(1, ...labels.map((label) => String(label).length));
  return Math.max(1, Math.min(labels.length, Math.floor(width / widest)));
}

/** Vertical bars from `low` to `high` for rows that have both: the range of repeats. */
function repeatBars(x, y, color, mark = {}) {
  const known = { filter: "isValid(datum.low) && isValid(datum.high)" };
  return { transform: [known], mark: { type: "rule", strokeWidth: 1.5, clip: true, ...mark },
    encoding: { x, y: { ...y, field: "low" }, y2: { field: "high" }, ...(color ? { color } : {}) } };
}

/** Points of runs; hollow if they have warnings. */
function runPoints(data, encoding, size) {
  const mark = { type: "point", clip: true, size, cursor: "pointer" };
  return [
    { ...data, params: [ZOOM], transform: [{ filter: "datum.warning === ''" }], mark, encoding },
    { ...data, transform: [{ filter: "datum.warning !== ''" }],
      mark: { ...mark, filled: false, strokeWidth: 2 }, encoding },
  ];
}

/** A time axis that starts at zero and ends slightly above the largest of `values`. */
const timeAxis = (title, values) => ({ type: "quantitative", title,
  scale: { domain: [0, 1.07 * Math.max(...values)], nice: false },
  axis: { format: "~r", tickCount: 6 } });
