// Runs that are not done, by outcome, and runs with warnings.

const OUTCOMES = [
  { id: "not-fit", status: "oom", title: "Did not fit",
    note: "These runs ran out of memory." },
  { id: "skipped", status: "skipped", title: "Skipped",
    note: "These runs were not started: their predicted peak exceeds the memory." },
  { id: "failed", status: "failed", title: "Failed",
    note: "These runs ended with an error other than out of memory." },
];

/** A link to a run, with its study and device if there are several. */
function runCells(run, shown, several) {
  return [
    el("button", { type: "button", class: "link", onclick: () => openRun(run.id) },
      run.label || settingText(run.axes, shown.get(run.axes.study))),
    ...["study", "device"].filter((axis) => several.includes(axis)).map((axis) => run.axes[axis]),
  ];
}

const runTitles = (several) => [{ title: "setting" },
  ...["study", "device"].filter((axis) => several.includes(axis)).map((title) => ({ title }))];

function outcomeTable(runs, all, status) {
  const shown = studyAxes(all);
  const several = varyingAxes(all);
  return table([...runTitles(several), { title: "predicted peak", number: true }, { title: "reason" }],
    runs.map((run) => [
      ...runCells(run, shown, several),
      run.record.predicted ? bytesText(run.record.predicted.peak_bytes) : null,
      el("span", { class: "reason" }, run.record.reason || ""),
    ]), { class: "outcome", "data-status": status }, "scroll tall");
}

function warningTable(runs, all) {
  const shown = studyAxes(all);
  const several = varyingAxes(all);
  return table([...runTitles(several), { title: "warning" }], runs.map((run) => [
    ...runCells(run, shown, several),
    el("span", { class: "reason" }, run.warnings.join("; ")),
  ]), { class: "outcome", "data-status": "warned" }, "scroll tall");
}

/** One section per outcome that occurs. */
function unfinishedView(runs) {
  const parts = OUTCOMES.map((outcome) => ({ ...outcome,
    runs: runs.filter((run) => run.status === outcome.status) })).filter((o) => o.runs.length > 0);
  const warned = runs.filter((run) => run.warnings.length > 0);
  const nodes = parts.flatMap(({ id, title, note, runs: own, status }) => [
    el("h3", { id }, title), el("p", { class: "note" }, note), outcomeTable(own, runs, status)]);
  if (warned.length > 0) {
    nodes.push(el("h3", { id: "warnings" }, "Warnings"), el("p", { class: "note" },
      "These runs are done, but their figures may not describe the setting. The verdict excludes them."),
    warningTable(warned, runs));
  }
  return nodes.length > 0 ? nodes : [el("p", {}, "All runs are done, without warnings.")];
}
