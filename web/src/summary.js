// The summary in words and figures, computed from all runs.

function summarySection(data, computed) {
  const { counts } = computed;
  const cards = computed.summaries.map((summary, i) =>
    summaryCard(data, summary, `summaries.${i}`, computed.summaries.length > 3));
  const unfit = ["oom", "failed", "skipped"].filter((s) => counts[s]);
  const names = { oom: "ran out of memory", failed: "failed", skipped: "were skipped" };
  const warned = computed.warned ? [" ", figure("warned", computed.warned, "count"),
    computed.warned > 1 ? " runs have warnings." : " run has a warning."] : [];
  return section("summary", "Summary",
    el("p", { class: "lead" }, figure("counts.done", counts.done, "count"),
      ` of ${data.runs.length} runs are done`,
      unfit.map((status, i) => [i === 0 ? "; " : ", ",
        figure(`counts.${status}`, counts[status], "count"), ` ${names[status]}`]).flat(),
      ".", ...warned, " A pair is two runs that differ only in recomputation; ranges are from the " +
      "lowest to the highest; time is for the same number of samples. The peak is that of " +
      "tensors on the device; kept is the memory held for the backward after the forward."),
    cards);
}

/** The strategy that the sentence describes: the one that lowers the peak most or, among
 *  equals, keeps least. */
function mainStrategy(summary) {
  const middle = (values) => (values ? values.median : -Infinity);
  return summary.strategies
    .map((strategy, i) => ({ ...strategy, path: `strategies.${i}` }))
    .filter((s) => s.kept || s.peak)
    .sort((a, b) => middle(b.peak) - middle(a.peak) || middle(b.kept) - middle(a.kept))[0];
}

function summaryCard(data, summary, path, closed) {
  const study = data.studies.find((s) => s.key === summary.study);
  const main = mainStrategy(summary);
  const node = el("article", { class: "card" },
    el("h3", {}, summary.model, el("span", { class: "of" },
      ` on ${summary.device} · ${study.name}`)));
  if (main) {
    node.append(el("p", { class: "note" }, `Recomputation with the lowest peak: ${main.recompute}. ` +
      "Medians of the pairs, with the lowest and the highest."), ...tiles(main, `${path}.${main.path}`),
      el("p", {}, ...recomputeWords(summary, main, `${path}.${main.path}`), " ",
        ...leverWords(summary, path)));
  } else {
    node.append(el("p", {}, ...leverWords(summary, path),
      leverWords(summary, path).length ? "" : "No two runs differ only in recomputation."));
  }
  const tables = [strategyTable(summary, path), sizeTable(summary, path),
    leverTable(summary, path), budgetTable(summary, path)].filter(Boolean);
  if (tables.length) {
    node.append(el("details", { open: !closed },
      el("summary", {}, "Tables: pairs, ways to lower the peak, best setting for each budget"),
      tables));
  }
  return node;
}

/** Whether the time difference of most repeated pairs is within the noise. */
const mostlyNoise = (pairs) => pairs.repeated > 0 && 2 * pairs.within_noise > pairs.repeated;

function tiles(main, path) {
  const tile = (name, key, words, signed) => {
    if (!main[key]) return null;
    // A reduction is written as a negative change, so the largest comes first.
    const [first, last] = signed === "fall" ? ["max", "min"] : ["min", "max"];
    const end = (which) => figure(`${path}.${key}.${which}`, main[key][which], signed);
    const noise = key === "time" && mostlyNoise(main);
    return el("div", { class: "tile" },
      el("span", { class: "name" }, name),
      el("span", { class: noise ? "value words" : "value" }, noise ? "no measurable difference"
        : figure(`${path}.${key}.median`, main[key].median, words)),
      hasRange(main[key], signed)
        ? el("span", { class: "range" }, end(first), " to ", end(last)) : null);
  };
  return [el("div", { class: "tiles" }, [
    tile("kept after the forward", "kept", "lower", "fall"),
    tile("peak", "peak", "lower", "fall"),
    tile("time", "time", "more", "change"),
  ].filter(Boolean))];
}

/** "87 % (median of 44 pairs; 82 % to 93 %)": an amount without a sign. */
function amount(path, values, n) {
  const parts = [figure(`${path}.median`, values.median, "percent")];
  const range = hasRange(values, "percent") ? [figure(`${path}.min`, values.min, "percent"), " to ",
    figure(`${path}.max`, values.max, "percent")] : [];
  if (n > 1) parts.push(` (median of ${n} pairs`, ...(range.length ? ["; ", ...range] : []), ")");
  else if (range.length) parts.push(" (", ...range, ")");
  return parts;
}

/** "takes 29 % more time (+21 % to +41 %)". */
function timeWords(main, path) {
  if (mostlyNoise(main)) return ["makes no measurable difference in time"];
  const { time } = main;
  const words = ["takes ", figure(`${path}.time.median`, time.median, "more"), " time"];
  if (hasRange(time, "change")) {
    words.push(" (", figure(`${path}.time.min`, time.min, "change"), " to ",
      figure(`${path}.time.max`, time.max, "change"), ")");
  }
  return words;
}

function peakWords(main, path) {
  const { peak } = main;
  if (peak.median > 0 && lowerText(peak.median) !== "unchanged") {
    return ["The peak falls by ", ...amount(`${path}.peak`, peak)];
  }
  return ["The peak is ", figure(`${path}.peak.median`, peak.median, "lower"),
    ...(hasRange(peak, "fall") ? [" (", figure(`${path}.peak.max`, peak.max, "fall"), " to ",
      figure(`${path}.peak.min`, peak.min, "fall"), ")"] : [])];
}

function recomputeWords(summary, main, path) {
  const words = [`Recomputation (${main.recompute}) `];
  if (main.kept) {
    words.push("lowers what is kept after the forward by ", ...amount(`${path}.kept`, main.kept, main.n));
  }
  if (main.time) words.push(main.kept ? " and " : "", ...timeWords(main, path));
  words.push(". ");
  if (main.kept && summary.sizes.length) {
    const mine = summary.sizes.filter((row) => row.recompute === main.recompute && row.kept);
    const half = mine.filter((row) => row.kept.median >= 0.5).length;
    words.push(half === mine.length
      ? `What is kept falls by at least half at each of the ${mine.length} sizes. `
      : `What is kept falls by at least half at ${half} of ${mine.length} sizes. `);
  }
  if (main.peak) words.push(...peakWords(main, path), ...momentWords(main, path), ". ", whyWords(main));
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

/** Explains why the peak does not fall although much less is kept. */
function whyWords(main) {
  const { without_at: before, with_at: after } = main;
  const same = before && after && momentText(before) === momentText(after);
  if (!same || before.phase !== "backward" || !before.stage || !main.kept ||
      main.peak.median >= main.kept.median / 2) return "";
  return `That stage's own backward needs its activations and their gradients ` +
    `whether they were kept or recomputed, so recomputation cannot lower it; ` +
    `fewer samples at a time can. `;
}

const LEVER_NAMES = {
  recompute: "recomputation at the same micro-batch",
  "micro-batch": "a smaller micro-batch with accumulation",
  both: "both",
  planned: "a plan for a budget",
};

/** "68 % lower peak, 12 % more time". */
function tradeWords(at, peak, time) {
  return [figure(`${at[0]}`, peak, "lower"), " peak, ",
    ...(time == null ? ["time not known"] : [figure(`${at[1]}`, time, "more"), " time"])];
}

function leverWords(summary, path) {
  // Only these two are compared; the table also has their combination.
  const single = summary.levers.map((lever, i) => ({ ...lever, at: `${path}.levers.${i}` }))
    .filter((lever) => ["recompute", "micro-batch"].includes(lever.lever));
  if (single.length === 0) return [];
  const best = single.reduce((a, b) => (b.peak.median > a.peak.median ? b : a));
  if (best.peak.median <= 0) return [];
  const { most } = best;
  const how = best.lever === "micro-batch" ? `${most.to} instead of ${most.from}`
    : `${most.recompute} at ${most.to}`;
  const size = most.size ? ` at ${most.size}` : "";
  const median = tradeWords([`${best.at}.peak.median`, `${best.at}.time.median`],
    best.peak.median, best.time && best.time.median);
  const words = ["At one global batch, ", el("b", {}, LEVER_NAMES[best.lever]),
    single.length > 1 ? " lowers the peak most: " : " lowers the peak: ", ...median];
  if (best.n === 1) return [...words, ` (${how}${size}).`];
  return [...words, " (medians of ", figure(`${best.at}.n`, best.n, "count"), `); the lowest peak has ${how}${size}: `,
    ...tradeWords([`${best.at}.most.peak`, `${best.at}.most.time`], most.peak, most.time), "."];
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
    el("span", {}, spreadFigure(`${path}.time`, row.time, "change"),
      mostlyNoise(row) ? noiseMark() : null),
    before === after ? before : `${before ?? "–"} → ${after ?? "–"}`,
  ];
}

function strategyTable(summary, path) {
  if (summary.strategies.length < 2) return null;
  return el("div", {}, el("h4", {}, "By strategy"),
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
    el("p", { class: "note" }, "Compared with the largest micro-batch without recomputation; of " +
      "several settings, the one with the lowest peak is shown."),
    table([{ title: "lever" }, { title: "cases", number: true }, { title: "peak", number: true },
      { title: "time", number: true }, { title: "largest reduction" }],
    summary.levers.map((lever, i) => {
      const at = `${path}.levers.${i}`;
      const { most } = lever;
      return [LEVER_NAMES[lever.lever], figure(`${at}.n`, lever.n, "count"),
        spreadFigure(`${at}.peak`, lever.peak, "fall"),
        spreadFigure(`${at}.time`, lever.time, "change"),
        el("span", { class: "most" }, `${most.to}, ${most.recompute}, instead of ${most.from}` +
          `${most.size ? ` at ${most.size}` : ""}: `,
        ...tradeWords([`${at}.most.peak`, `${at}.most.time`], most.peak, most.time))];
    })));
}

function budgetTable(summary, path) {
  const { budgets, rows } = summary.best;
  if (budgets.length === 0) return null;
  return el("div", {}, el("h4", {}, "The fastest setting that fits a budget"),
    el("p", { class: "note" }, "Among the runs of this study: samples/s, the setting " +
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
