// Assembles the page.

const VIEW_TITLES = {
  grid: "Memory, utilisation and time",
  checkpoints: "Number of checkpoints",
  ranks: "Ranks",
  steps: "BEFORE / AFTER",
  frontier: "Time against memory",
};

const results = JSON.parse(document.getElementById("results").textContent);
const data = readRecords(results.records);
allRuns = new Map(data.runs.map((run) => [run.id, run]));
const computed = computeAll(data);
document.body.append(el("script", { type: "application/json", id: "computed" },
  JSON.stringify(computed).replace(/</g, "\\u003c")));

/** The views of one study, for the runs that pass the filters. */
function studyViews(study, runs, rerender) {
  const own = runs.filter((run) => run.axes.study === study.key);
  const points = pointsOf(own);
  const parts = [];
  // A view that cannot show these runs has no heading.
  const part = (title, node) => node.childElementCount && parts.push(
    el("div", { class: "view" }, el("h3", { class: "view-title" }, title), node));
  if (own.length === 0) return [el("p", { class: "note" }, "No run of this study passes the filters.")];
  if (points.length === 0) return [el("p", { class: "note" }, "No run of this study has finished.")];
  const all = own.length === data.runs.filter((run) => run.axes.study === study.key).length;
  // With filters, tables are recomputed for the visible runs.
  const at = (view) => (all
    ? `${view}.${computed[view].findIndex((c) => c.study === study.key)}` : "filtered");
  if (study.views.includes("steps")) {
    part(VIEW_TITLES.steps, stepsView(study, { tables: stepTables(study, own) }, at("steps")));
  }
  if (study.views.includes("ranks")) {
    part(VIEW_TITLES.ranks, ranksView(study, { tables: rankTables(points) }, at("ranks")));
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

/** The title of the page: the study, or the number of studies. */
function aboutPage() {
  const several = data.studies.length > 1;
  const [study] = data.studies;
  const made = dateText(results.made);
  return el("div", { class: "about" },
    study ? el("p", {}, el("b", {}, several ? `${data.studies.length} studies` : study.name),
      ` · ${provenanceText(several ? null : study, data.runs)}`) : null,
    made ? el("p", {}, `Page created on ${made}.`) : null);
}

function makePage() {
  const main = document.getElementById("page");
  const bodies = data.studies.map((study) => ({ study, node: el("div", { class: "study-body" }) }));
  const unfinished = el("div", {});
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
    unfinished.replaceChildren(...unfinishedView(shown));
    runs.replaceChildren(runsView(shown));
  });
  const runsOf = (study) => data.runs.filter((run) => run.axes.study === study.key);
  const idOf = (study) => `study-${slug(study.key)}`;
  const links = [["summary", "Summary"], ...data.studies.map((s) => [idOf(s), s.name]),
    ["unfinished", "Unfinished, warnings"], ["all-runs", "All runs"]];
  main.replaceChildren(
    aboutPage(),
    verdictSection(data, computed),
    el("nav", {}, links.map(([id, text]) => el("a", { href: `#${id}` }, text))),
    summarySection(data, computed),
    filters.node,
    el("p", { class: "note help" }, "Plots: hover over a mark for its figures, drag to pan, Ctrl and " +
      "the wheel to zoom, double-click to reset; click a point of time against memory to open its run."),
    ...bodies.map(({ study, node }) => section(idOf(study), study.name,
      el("p", { class: "provenance" }, provenanceText(study, runsOf(study))),
      study.question ? el("p", { class: "question" }, study.question) : null, node)),
    section("unfinished", "Unfinished runs and warnings", unfinished),
    section("all-runs", "All runs", el("p", { class: "note" },
      "Click a heading to sort. Each run opens with the command that repeats it and its observations."), runs),
    el("footer", {}, el("p", {}, "Created from results.jsonl only. Drawn with " +
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

/** For tests and for the command that saves plots: report.html#plots writes all plots into
 *  the document. */
window.reprise = { drawAll, savedPlots, openRun, computed };
if (window.location.hash === "#plots") {
  savedPlots().then((saved) => document.body.append(el("script",
    { type: "application/json", id: "plots" }, JSON.stringify(saved).replace(/</g, "\\u003c"))));
}
