// Puts the page together.

const VIEW_TITLES = {
  grid: "Memory, utilisation and time",
  checkpoints: "How many checkpoints",
  steps: "BEFORE / AFTER",
  frontier: "Time against memory",
};

const data = readRecords(JSON.parse(document.getElementById("results").textContent).records);
allRuns = new Map(data.runs.map((run) => [run.id, run]));
const computed = computeAll(data);
document.body.append(el("script", { type: "application/json", id: "computed" },
  JSON.stringify(computed).replace(/</g, "\\u003c")));

/** The views of one study, of the runs that the filters leave. */
function studyViews(study, runs, rerender) {
  const own = runs.filter((run) => run.axes.study === study.study);
  const points = pointsOf(own);
  const parts = [];
  // What a view cannot show of these runs has no heading either.
  const part = (title, node) => node.childElementCount && parts.push(
    el("div", { class: "view" }, el("h3", { class: "view-title" }, title), node));
  if (own.length === 0) return [el("p", { class: "note" }, "The filters leave no run of this study.")];
  if (points.length === 0) return [el("p", { class: "note" }, "No run of this study is done.")];
  const all = own.length === data.runs.filter((run) => run.axes.study === study.study).length;
  // Under a filter the tables are of what is shown, and so not those computed above.
  const at = (view) => (all
    ? `${view}.${computed[view].findIndex((c) => c.study === study.study)}` : "filtered");
  if (study.views.includes("steps")) {
    part(VIEW_TITLES.steps, stepsView(study, { tables: stepTables(study, own) }, at("steps")));
  }
  if (study.views.includes("checkpoints")) {
    part(VIEW_TITLES.checkpoints, checkpointsView(study,
      { tables: checkpointTables(study, points) }, at("checkpoints")));
  }
  if (study.views.includes("grid")) part(VIEW_TITLES.grid, gridView(study, own, points, rerender));
  part(VIEW_TITLES.frontier, frontierView(study, points));
  part("Memory by category", categoriesView(study, points, rerender));
  return parts;
}

function makePage() {
  const main = document.getElementById("page");
  const bodies = data.studies.map((study) => ({ study, node: el("div", { class: "study-body" }) }));
  const unfit = el("div", {});
  const runs = el("div", {});
  let now = data.runs;
  const renderStudies = () => {
    for (const { study, node } of bodies) {
      dropPlots(node);
      node.replaceChildren(...studyViews(study, now, renderStudies));
    }
  };
  const filters = makeFilters(data.runs, (shown) => {
    now = shown;
    renderStudies();
    unfit.replaceChildren(unfitView(shown));
    runs.replaceChildren(runsView(shown));
  });
  const devices = valuesOf(data.runs, "device");
  const versions = [...new Set(data.runs.map((run) => run.record.versions)
    .filter(Boolean).map((v) => Object.entries(v)
      .map(([name, version]) => `${name === "libtorch" ? "LibTorch" : name} ${version}`)
      .join(", ")))];
  const links = [["summary", "Summary"], ...data.studies.map((s) => [`study-${slug(s.study)}`,
    s.title || s.study]), ["not-fit", "What did not fit"], ["all-runs", "All runs"]];
  main.replaceChildren(
    el("p", { class: "about" }, `${data.studies.map((s) => s.title || s.study).join(" · ")} — ` +
      `${devices.join(" · ")}`),
    el("nav", {}, links.map(([id, text]) => el("a", { href: `#${id}` }, text))),
    summarySection(data, computed),
    filters.node,
    el("p", { class: "note help" }, "Plots: point at a mark for its figures, drag to move, Ctrl and " +
      "the wheel to zoom, double click to go back; a click on a point of the frontier opens its run."),
    ...bodies.map(({ study, node }) => section(`study-${slug(study.study)}`, study.title || study.study,
      study.question ? el("p", { class: "question" }, study.question) : null, node)),
    section("not-fit", "What did not fit", unfit),
    section("all-runs", "All runs", el("p", { class: "note" },
      "A heading sorts. Each run opens with the command that repeats it and what the observer saw."), runs),
    el("footer", {}, el("p", {}, `Made from results.jsonl alone. ${versions.join("; ")}. Drawn with ` +
      `Vega ${vega.version} and Vega-Lite ${vegaLite.version} (BSD 3-Clause), whose notices are in ` +
      "this page's source.")));
  filters.changed();
}

function startTheme() {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const apply = () => setTheme(chosen || (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", apply);
  document.getElementById("theme").addEventListener("click", () => {
    chosen = theme === "dark" ? "light" : "dark";
    apply();
  });
  apply();
  let before = [];
  window.addEventListener("beforeprint", () => {
    setTheme("light");
    before = [...document.querySelectorAll("details:not([open])")];
    before.filter((node) => !node.classList.contains("filters")).forEach((node) => { node.open = true; });
    drawAll();
  });
  window.addEventListener("afterprint", () => {
    before.forEach((node) => { node.open = false; });
    apply();
  });
}

startTheme();
makePage();

let resizing = 0;
window.addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(redrawDrawn, 150);
});

/** For tests, and for the command that saves plots: report.html#plots writes all
 *  of them into the page. */
window.reprise = { drawAll, savedPlots, openRun, computed };
if (window.location.hash === "#plots") {
  savedPlots().then((saved) => document.body.append(el("script",
    { type: "application/json", id: "plots" }, JSON.stringify(saved).replace(/</g, "\\u003c"))));
}
