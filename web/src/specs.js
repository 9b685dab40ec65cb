// Parts of Vega-Lite specifications that several plots have.

/** Drag moves, Ctrl and the wheel zooms (a wheel alone scrolls the page), a double
 *  click goes back. */
const ZOOM = {
  name: "zoom",
  select: { type: "interval", zoom: "wheel![event.ctrlKey || event.metaKey]" },
  bind: "scales",
};

/** {bytes, name} in which ticks are round numbers: GiB if the largest value has one. */
function unitFor(values) {
  const gib = Math.max(...values) >= 2 ** 30;
  return gib ? { bytes: 2 ** 30, name: "GiB" } : { bytes: 2 ** 20, name: "MiB" };
}

/** Labels of an axis in `unit`; what is below one has the next smaller unit. */
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

/** An axis of memory in `unit`. */
const memoryAxis = (title, unit) => ({
  type: "quantitative",
  title,
  scale: logScale ? { type: "log", base: 2, nice: false, padding: 10 } : { zero: true },
  axis: { labelExpr: unitLabel(unit, logScale), tickCount: 6 },
});

const tips = (...names) => names.map((name) => ({ field: name, type: "nominal" }));

/** An axis' label expression that has long names in several lines. */
function wrappedLabels(names, characters) {
  const lines = Object.fromEntries(names.map((name) => [name, name.split(" ").reduce((all, word) => {
    const last = all[all.length - 1];
    if (last && last.length + word.length < characters) all[all.length - 1] = `${last} ${word}`;
    else all.push(word);
    return all;
  }, [])]));
  return `${JSON.stringify(lines)}[datum.label]`;
}

/** How wide each of `n` plots side by side is; on a phone they stand in a column. */
function facetSize({ width, narrow }, n, left = 64) {
  const columns = narrow ? 1 : Math.min(n, 2);
  return { columns, width: Math.max(120, Math.floor((width - left - 24 * columns) / columns)) };
}

/** Colour and shape by one ordered value. */
function byColourAndShape(field, title, values) {
  return {
    color: { field, type: "nominal", title, sort: values, scale: { domain: values } },
    shape: { field, type: "nominal", title, sort: values, scale: { domain: values } },
  };
}

/** How many columns a legend of these labels has, so that none leaves the plot. */
function legendColumns(labels, width) {
  const widest = 34 + 6.4 * Math.max(1, ...labels.map((label) => String(label).length));
  return Math.max(1, Math.min(labels.length, Math.floor(width / widest)));
}

/** Upright bars from `low` to `high` of rows that have both: the range of repeats. */
function repeatBars(x, y, color, mark = {}) {
  const known = { filter: "isValid(datum.low) && isValid(datum.high)" };
  return { transform: [known], mark: { type: "rule", strokeWidth: 1.5, clip: true, ...mark },
    encoding: { x, y: { ...y, field: "low" }, y2: { field: "high" }, ...(color ? { color } : {}) } };
}

/** Points of runs, hollow if they have warnings. */
function runPoints(data, encoding, size) {
  const mark = { type: "point", clip: true, size, cursor: "pointer" };
  return [
    { ...data, params: [ZOOM], transform: [{ filter: "datum.warning === ''" }], mark, encoding },
    { ...data, transform: [{ filter: "datum.warning !== ''" }],
      mark: { ...mark, filled: false, strokeWidth: 2 }, encoding },
  ];
}

/** An axis of times from zero, so that heights are times, to a little above the highest
 *  of `values`. */
const timeAxis = (title, values) => ({ type: "quantitative", title,
  scale: { domain: [0, 1.07 * Math.max(...values)], nice: false },
  axis: { format: "~r", tickCount: 6 } });
