// What was found, in words and figures; all of it computed, of all runs.

function summarySection(data, computed) {
  const { counts } = computed;
  const cards = computed.summaries.map((summary, i) =>
    summaryCard(data, summary, `summaries.${i}`, computed.summaries.length > 3));
  const unfit = ["oom", "failed", "skipped"].filter((s) => counts[s]);
  const names = { oom: "ran out of memory", failed: "failed", skipped: "were skipped" };
  return section("summary", "Summary",
    el("p", { class: "lead" }, figure("counts.done", counts.done, "count"),
      ` of ${data.runs.length} runs are done`,
      unfit.map((status, i) => [i === 0 ? "; " : ", ",
        figure(`counts.${status}`, counts[status], "count"), ` ${names[status]}`]).flat(),
      ". A pair is two runs that differ in recomputation alone; ranges are from the " +
      "lowest to the highest; time is for the same number of samples. The peak is of " +
      "tensors on the device; kept is what is held for the backward after the forward."),
    cards);
}

/** The way to recompute that the sentence is about: the one with most pairs, of
 *  those the one that keeps least. */
function mainStrategy(summary) {
  return summary.strategies
    .map((strategy, i) => ({ ...strategy, path: `strategies.${i}` }))
    .filter((s) => s.kept || s.peak)
    .sort((a, b) => b.n - a.n ||
      ((b.kept && b.kept.median) ?? 0) - ((a.kept && a.kept.median) ?? 0))[0];
}

function summaryCard(data, summary, path, closed) {
  const study = data.studies.find((s) => s.study === summary.study);
  const main = mainStrategy(summary);
  const node = el("article", { class: "card" },
    el("h3", {}, summary.model, el("span", { class: "of" },
      ` on ${summary.device} · ${study.title || study.study}`)));
  if (main) {
    node.append(...tiles(main, `${path}.${main.path}`),
      el("p", {}, ...recomputeWords(summary, main, `${path}.${main.path}`), " ",
        ...leverWords(summary, path)));
  } else {
    node.append(el("p", {}, ...leverWords(summary, path),
      leverWords(summary, path).length ? "" : "No run has a partner that differs in recomputation alone."));
  }
  const tables = [strategyTable(summary, path), sizeTable(summary, path),
    leverTable(summary, path), budgetTable(summary, path)].filter(Boolean);
  if (tables.length) {
    node.append(el("details", { open: !closed },
      el("summary", {}, "Figures: pairs, ways to lower the peak, best setting for each budget"),
      tables));
  }
  return node;
}

function tiles(main, path) {
  const tile = (name, key, format) => main[key] && el("div", { class: "tile" },
    el("span", { class: "name" }, name),
    el("span", { class: "value" }, figure(`${path}.${key}.median`, main[key].median, format)),
    !hasRange(main[key], format) ? null : el("span", { class: "range" },
      figure(`${path}.${key}.${format === "fall" ? "max" : "min"}`,
        format === "fall" ? main[key].max : main[key].min, format), " to ",
      figure(`${path}.${key}.${format === "fall" ? "min" : "max"}`,
        format === "fall" ? main[key].min : main[key].max, format)));
  return [el("div", { class: "tiles" }, [
    tile("kept after the forward", "kept", "fall"),
    tile("peak", "peak", "fall"),
    tile("time", "time", "change"),
  ])];
}

/** "87 % (median of 44 pairs; 82 to 93 %)", as an amount without a sign. */
function amount(path, values, n) {
  const parts = [figure(`${path}.median`, values.median, "percent")];
  const range = hasRange(values, "percent") ? [figure(`${path}.min`, values.min, "percent"), " to ",
    figure(`${path}.max`, values.max, "percent")] : [];
  if (n > 1) parts.push(` (median of ${n} pairs`, ...(range.length ? ["; ", ...range] : []), ")");
  else if (range.length) parts.push(" (", ...range, ")");
  return parts;
}

/** "29 % more time (21 % to 41 %)"; with signs where some took less. */
function moreTime(path, values) {
  const format = values.min < 0 ? "change" : "percent";
  const words = [figure(`${path}.median`, values.median, format), format === "change" ? " time" : " more time"];
  if (hasRange(values, format)) {
    words.push(" (", figure(`${path}.min`, values.min, format), " to ",
      figure(`${path}.max`, values.max, format), ")");
  }
  return words;
}

function recomputeWords(summary, main, path) {
  const words = [`Recomputation (${main.recompute}) `];
  if (main.kept) {
    words.push("cut what is kept after the forward by ", ...amount(`${path}.kept`, main.kept, main.n));
  }
  if (main.time) {
    words.push(main.kept ? " for " : "cost ", ...moreTime(`${path}.time`, main.time));
  }
  words.push(". ");
  if (main.kept && summary.sizes.length) {
    const mine = summary.sizes.filter((row) => row.recompute === main.recompute && row.kept);
    const half = mine.filter((row) => row.kept.median >= 0.5).length;
    words.push(half === mine.length
      ? `It fell by at least half at each of the ${mine.length} sizes. `
      : `It fell by at least half at ${half} of ${mine.length} sizes. `);
  }
  if (main.peak) {
    words.push(...(Math.abs(main.peak.median) < 0.0005
      ? ["The peak itself stayed as it was: ",
        spreadFigure(`${path}.peak`, main.peak, "fall")]
      : main.peak.median < 0
      ? ["The peak itself rose: ", spreadFigure(`${path}.peak`, main.peak, "fall")]
      : ["The peak itself fell by ", ...amount(`${path}.peak`, main.peak)]));
    words.push(...momentWords(main, path), ". ");
    words.push(whyWords(main));
  }
  return words;
}

function momentWords(main, path) {
  const { without_at: before, with_at: after } = main;
  if (!before || !after) return [];
  const moment = (at) => momentText(at);
  const times = (at, where) => at.of < 2 ? [] : [" in ",
    figure(`${path}.${where}.n`, at.n, "count"), ` of ${at.of} runs`];
  if (moment(before) === moment(after)) {
    return [`: it is set by the ${moment(before)} with recomputation`,
      ...times(after, "with_at"), " as without it", ...times(before, "without_at")];
  }
  return [`: without recomputation the ${moment(before)} sets it`,
    ...times(before, "without_at"), `, with it the ${moment(after)}`,
    ...times(after, "with_at")];
}

/** Why a peak stays although much less is kept. */
function whyWords(main) {
  const { without_at: before, with_at: after } = main;
  const same = before && after && momentText(before) === momentText(after);
  if (!same || before.phase !== "backward" || !before.stage || !main.kept ||
      main.peak.median >= main.kept.median / 2) return "";
  return `That stage's own backward needs its activations and their gradients ` +
    `whether they were kept or made again, so recomputation cannot lower it; ` +
    `fewer samples at a time can. `;
}

const LEVER_NAMES = {
  recompute: "recomputation, same micro-batch",
  "micro-batch": "a smaller micro-batch, accumulated",
  both: "both",
  planned: "a plan for a budget",
};

function leverWords(summary, path) {
  // The choice between the two; what combines them is left to the table.
  const single = summary.levers.map((lever, i) => ({ ...lever, at: `${path}.levers.${i}` }))
    .filter((lever) => ["recompute", "micro-batch"].includes(lever.lever));
  if (single.length === 0) return [];
  const best = single.reduce((a, b) => (b.peak.median > a.peak.median ? b : a));
  if (best.peak.median <= 0) return [];
  const { most } = best;
  const how = best.lever === "micro-batch" ? `${most.to} instead of ${most.from}`
    : `${most.recompute} at ${most.to}`;
  return [
    single.length > 1 ? "What lowers the peak most at one global batch is " : "At one global batch ",
    el("b", {}, LEVER_NAMES[best.lever]), single.length > 1 ? ": " : " lowers the peak: ",
    figure(`${best.at}.peak.median`, best.peak.median, "fall"), " for ",
    best.time ? figure(`${best.at}.time.median`, best.time.median, "change") : "–", " time",
    best.n > 1 ? " (medians of " : "", best.n > 1 ? figure(`${best.at}.n`, best.n, "count") : "",
    best.n > 1 ? "); the most with " : ", with ", how, most.size && best.n > 1 ? ` at ${most.size}` : "",
    ...(best.n > 1 ? [": ", figure(`${best.at}.most.peak`, most.peak, "fall"), " for ",
      most.time == null ? "–" : figure(`${best.at}.most.time`, most.time, "change"), " time"] : []), ".",
  ];
}

const PAIR_COLUMNS = [
  { title: "pairs", number: true },
  { title: "kept after the forward", number: true },
  { title: "peak", number: true },
  { title: "time", number: true },
  { title: "what sets the peak, without → with" },
];

function pairCells(row, path) {
  const before = row.without_at && momentText(row.without_at);
  const after = row.with_at && momentText(row.with_at);
  return [
    figure(`${path}.n`, row.n, "count"),
    spreadFigure(`${path}.kept`, row.kept, "fall"),
    spreadFigure(`${path}.peak`, row.peak, "fall"),
    spreadFigure(`${path}.time`, row.time, "change"),
    before === after ? before : `${before ?? "–"} → ${after ?? "–"}`,
  ];
}

function strategyTable(summary, path) {
  if (summary.strategies.length < 2) return null;
  return el("div", {}, el("h4", {}, "By way of recomputing"),
    table([{ title: "recomputation" }, ...PAIR_COLUMNS], summary.strategies.map((row, i) =>
      [row.recompute, ...pairCells(row, `${path}.strategies.${i}`)])));
}

function sizeTable(summary, path) {
  if (summary.sizes.length === 0) return null;
  const several = summary.strategies.length > 1;
  return el("div", {}, el("h4", {}, "By size"),
    table([{ title: "size" }, ...(several ? [{ title: "recomputation" }] : []), ...PAIR_COLUMNS],
      summary.sizes.map((row, i) => [row.size, ...(several ? [row.recompute] : []),
        ...pairCells(row, `${path}.sizes.${i}`)])));
}

function leverTable(summary, path) {
  if (summary.levers.length === 0) return null;
  return el("div", {}, el("h4", {}, "What lowers the peak at one global batch"),
    el("p", { class: "note" }, "Against the largest micro-batch without recomputation; of " +
      "several settings the one with the lowest peak."),
    table([{ title: "lever" }, { title: "cases", number: true }, { title: "peak", number: true },
      { title: "time", number: true }, { title: "the most" }],
    summary.levers.map((lever, i) => {
      const at = `${path}.levers.${i}`;
      const { most } = lever;
      return [LEVER_NAMES[lever.lever], figure(`${at}.n`, lever.n, "count"),
        spreadFigure(`${at}.peak`, lever.peak, "fall"),
        spreadFigure(`${at}.time`, lever.time, "change"),
        el("span", { class: "most" }, `${most.to}, ${most.recompute}, instead of ${most.from}` +
          `${most.size ? ` at ${most.size}` : ""}: `,
        figure(`${at}.most.peak`, most.peak, "fall"), ", ",
        most.time == null ? "–" : figure(`${at}.most.time`, most.time, "change"), " time")];
    })));
}

function budgetTable(summary, path) {
  const { budgets, rows } = summary.best;
  if (budgets.length === 0) return null;
  return el("div", {}, el("h4", {}, "The fastest setting that fits a budget"),
    el("p", { class: "note" }, "Among the runs made: samples a second, the setting " +
      "(micro-batch × accumulation), its peak."),
    table([{ title: "" }, ...budgets.map((b) => ({ title: bytesText(b), number: true }))],
      rows.map((row, i) => [row.row || "all", ...row.cells.map((cell, j) => {
        if (!cell) return el("span", { class: "none" }, "nothing fits");
        const at = `${path}.best.rows.${i}.cells.${j}`;
        return el("span", { class: "best" },
          el("b", {}, figure(`${at}.samples_per_s`, cell.samples_per_s, "number"), "/s"),
          el("span", {}, cell.setting),
          el("span", { class: "range" }, figure(`${at}.peak`, cell.peak, "bytes")));
      })]), { class: "budgets" }));
}
