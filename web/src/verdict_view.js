// The verdicts: the recommended setting in one sentence, and the chart behind it.

/** "16 × 8 without recomputation", "a plan for 3GiB (8 × 4)", followed by the other choices of
 *  the study. */
function settingWords(point, others) {
  const varies = (name) => others.some((other) => other[name] !== point[name]);
  const extra = TECHNIQUE_AXES.filter((name) => point[name] != null && varies(name))
    .map((name) => point[name]);
  const way = point.memory != null ? `a plan for ${point.memory} (${point.batch})`
    : point.recompute === "none" ? `${point.batch} without recomputation`
    : `${point.batch} with recomputation (${point.recompute})`;
  return [way, ...extra].join(", ");
}

/** "448 px, adam, global batch 128": the values that all settings of a case share. */
function workWords(found, study) {
  const techniques = study.views.includes("steps") ? []
    : [found.optimizer, found.precision === "fp32" ? null : found.precision];
  return [found.size, ...techniques.filter(Boolean),
    found.ranks > 1 ? valueText("ranks", found.ranks) : null,
    `global batch ${found.global_batch}`].filter(Boolean).join(", ");
}

function changeWords(found, at, key, format, noun) {
  if (found[`${key}_noise`]) return [`no measurable difference in ${noun}`];
  return [figure(`${at}.${key}`, found[key], format), ` ${noun}`];
}

function headline(found, at) {
  const both = [found.base, found.pick];
  const size = found.size ? ` at ${found.size}` : "";
  if (found.keep) {
    return [`Keep ${settingWords(found.base, both)}${size}: no other setting gives a better trade-off`];
  }
  return [`Use ${settingWords(found.pick, both)}: `,
    ...changeWords(found, at, "peak", "lower", "peak"), ", ",
    ...changeWords(found, at, "time", "more", "time"), size];
}

/** "peak 164 MiB instead of 513 MiB": a figure of the recommendation and of the baseline. */
function insteadOf(found, at, key, format) {
  return [figure(`${at}.pick.${key}`, found.pick[key], format), " instead of ",
    figure(`${at}.base.${key}`, found.base[key], format)];
}

/** What was compared. */
function basisWords(found, at, study) {
  const parts = [];
  if (!found.keep) {
    parts.push(`Compared with ${settingWords(found.base, [found.base, found.pick])}: peak `,
      ...insteadOf(found, at, "peak", "bytes"), ", ", ...insteadOf(found, at, "ms", "ms"), " per sample. ");
  }
  if (found.pick.dataset != null) {
    parts.push("The dataset takes another ", figure(`${at}.pick.dataset`, found.pick.dataset, "bytes"), ". ");
  }
  parts.push(found.keep ? "Of " : "Best of ", figure(`${at}.settings`, found.settings, "count"),
    ` settings of the same work: ${workWords(found, study)}. `);
  parts.push(found.repeats > 1 ? `Figures are medians of up to ${found.repeats} repeats. `
    : "Each setting was run once, so differences of a few percent may be noise. ");
  if (found.warned) {
    parts.push(figure(`${at}.warned`, found.warned, "count"), found.warned > 1
      ? " more settings have warnings and are left out." : " more setting has warnings and is left out.");
  }
  return parts;
}

const RULE = "The recommended setting has the smallest product of peak and time among those that " +
  `take at most ${moreText(MOST_TIME - 1)} time than the baseline: the largest micro-batch without ` +
  `recomputation. If the product is less than ${100 * LEAST_GAIN}${NO_BREAK}% smaller, or the difference is ` +
  "within the noise, the baseline is recommended.";

/** The card of one study, device and model. `group` has the points, `stated` the figures under
 *  `path`. */
function verdictCard(group, stated, path, several) {
  const { study, device, model, cases } = group;
  const body = el("div", {});
  const show = (i) => {
    dropPlots(body);
    const found = stated.cases[i];
    const at = `${path}.cases.${i}`;
    body.replaceChildren(
      el("h2", { class: "headline" }, ...headline(found, at)),
      el("p", { class: "basis" }, ...basisWords(found, at, study)),
      tradeoffPlot(group, cases[i], workWords(found, study), i));
  };
  const node = el("article", { class: "card verdict" },
    el("p", { class: "of" }, `${model} on ${device}${several ? ` · ${study.name}` : ""}`), body);
  if (cases.length > 1) {
    node.append(el("details", {}, el("summary", {}, `All ${cases.length} sizes, optimizers and global batches`),
      verdictTable(study, stated, path, (i) => {
        show(i);
        node.scrollIntoView({ block: "start" });
      })));
  }
  show(0);
  return node;
}

function tradeoffPlot({ study, device, model }, verdict, words, i) {
  return plot({
    name: slug(study.key, "trade-off", device, model, i === 0 ? "" : words),
    title: "Peak memory against time",
    note: "Lower and further left is better." + (verdict.points.some((p) => p.runs.length > 1)
      ? " Vertical bars show the range of the repeats." : "") + (verdict.warned ? " Hollow points have warnings." : ""),
    saved: `${model}, ${words}, ${device}`,
    height: 330,
    spec: (page) => tradeoffSpec(verdict, page),
    rows: () => tradeoffCsv(verdict),
    onclick: (datum) => datum && datum.id && openRun(datum.id),
  });
}

function verdictTable(study, stated, path, show) {
  return table([{ title: "work" }, { title: "recommended" }, { title: "instead of" },
    { title: "peak", number: true }, { title: "time", number: true }], stated.cases.map((found, i) => {
    const at = `${path}.cases.${i}`;
    const both = [found.base, found.pick];
    const cell = (key, format) => (found.keep ? "–" : found[`${key}_noise`] ? "no measurable difference"
      : figure(`${at}.${key}`, found[key], format));
    return [el("button", { type: "button", class: "link", onclick: () => show(i) }, workWords(found, study)),
      found.keep ? "the baseline" : settingWords(found.pick, both), settingWords(found.base, both),
      cell("peak", "lower"), cell("time", "more")];
  }));
}

function verdictSection(data, computed) {
  const groups = verdictGroups(data.studies, pointsOf(data.runs));
  if (groups.length === 0) {
    return el("section", { id: "verdict" }, el("p", { class: "note" },
      "No verdict: it needs a run without recomputation and another setting with the same global batch."));
  }
  return el("section", { id: "verdict" },
    el("div", { class: "verdicts" }, groups.map((group, i) => verdictCard(group, computed.verdicts[i],
      `verdicts.${i}`, data.studies.length > 1))),
    el("p", { class: "note" }, RULE));
}
