// Filters: each value of an axis can be switched off.

function makeFilters(runs, onchange) {
  const off = new Map();
  const axes = filterAxes(runs);
  const buttons = new Map();
  const count = el("span", { class: "count" });
  const shown = () => runs.filter((run) => axes.every((axis) =>
    run.axes[axis] == null || !off.get(axis).has(String(run.axes[axis]))));

  const changed = () => {
    for (const [button, [axis, value]] of buttons) {
      button.setAttribute("aria-pressed", String(!off.get(axis).has(value)));
    }
    const now = shown();
    count.textContent = now.length === runs.length
      ? `all ${runs.length} runs` : `${now.length} of ${runs.length} runs`;
    onchange(now);
  };

  const row = (axis) => {
    off.set(axis, new Set());
    const values = valuesOf(runs, axis).map(String);
    return el("div", { class: "axis" }, el("span", { class: "name" }, axisName(axis)),
      values.map((value) => {
        const button = el("button", { type: "button", class: "chip", "aria-pressed": "true",
          "data-axis": axis, "data-value": value, onclick: () => {
            const hidden = off.get(axis);
            // The first click on a row selects that value only, which is the most common use.
            if (hidden.size === 0) values.filter((v) => v !== value).forEach((v) => hidden.add(v));
            else if (hidden.has(value)) hidden.delete(value);
            else hidden.add(value);
            if (hidden.size === values.length) hidden.clear();
            changed();
          } }, valueText(axis, value));
        buttons.set(button, [axis, value]);
        return button;
      }));
  };

  const reset = el("button", { type: "button", class: "small", id: "reset-filters", onclick: () => {
    off.forEach((hidden) => hidden.clear());
    changed();
  } }, "Show all");
  const scale = el("button", { type: "button", class: "small", id: "log-scale", onclick: () => {
    logScale = !logScale;
    scale.textContent = logScale ? "Linear scales" : "Logarithmic scales";
    changed();
  } }, "Linear scales");
  const node = el("details", { class: "filters", id: "filters" },
    el("summary", {}, el("b", {}, "Filter"), " ", count),
    el("div", { class: "rows" }, axes.map(row), el("div", { class: "axis" }, reset, scale),
      el("p", { class: "note" }, "The first click on a value shows it alone; further clicks add " +
        "or remove values. Verdict and summary always cover all runs.")));
  return { node, changed };
}
