// Helpers that create DOM elements.

/** el("p", {class: "x"}, "text", child, ...); null children are skipped. */
function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value == null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child != null));
  return node;
}

/** A computed figure stored under `path`, with its format. */
function figure(path, value, format) {
  if (value == null) return el("span", { class: "none" }, "–");
  return el("span", { "data-figure": path, "data-format": format }, FORMATS[format](value));
}

/** Whether a range should be shown: not if both ends read the same. */
function hasRange(values, format) {
  return values.n > 1 && FORMATS[format](values.min) !== FORMATS[format](values.max);
}

/** "−91 % (−94 to −89 %)" for a spread. */
function spreadFigure(path, values, format) {
  if (!values) return el("span", { class: "none" }, "–");
  const middle = figure(`${path}.median`, values.median, format);
  if (!hasRange(values, format)) return middle;
  // A reduction is shown as a negative change, so the largest comes first.
  const ends = format === "fall" ? ["max", "min"] : ["min", "max"];
  return el("span", {}, middle, el("span", { class: "range" }, " (",
    figure(`${path}.${ends[0]}`, values[ends[0]], format), " to ",
    figure(`${path}.${ends[1]}`, values[ends[1]], format), ")"));
}

/** A table in a box that scrolls horizontally. `columns`: {title, number}; `rows`: lists of
 *  cells. */
function table(columns, rows, attributes = {}, box = "scroll") {
  const cell = (tag, column, content, extra = {}) =>
    el(tag, { class: column.number ? "number" : null, ...extra }, content ?? "–");
  return el("div", { class: box, tabindex: "0" }, el("table", attributes,
    el("thead", {}, el("tr", {}, columns.map((column) =>
      cell("th", column, column.title, { scope: "col" })))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((content, i) =>
      cell(i === 0 ? "th" : "td", columns[i], content,
        i === 0 ? { scope: "row" } : {})))))));
}

function section(id, title, ...children) {
  return el("section", { id }, el("h2", {}, title), ...children);
}

/** Marks a difference that is within the noise. */
const noiseMark = () => el("span", { class: "noise" }, " no measurable difference");
