// Pure functions that compute every figure on the page from the points. The result is
// also written into the page, so that it can be checked.

const fall = (before, after) =>
  (before == null || after == null || before === 0 ? null : 1 - after / before);
/** The relative increase of time for the same samples: 0.25 is 25 % more. */
const paid = (before, after) =>
  (before == null || after == null ? null : before / after - 1);

/** Whether the difference of two points is within the noise: the ranges of their repeats
 *  overlap. Null if neither was repeated. */
function withinNoise(a, b, name) {
  const [x, y] = [a.ranges[name], b.ranges[name]];
  if (!x || !y || (x.n < 2 && y.n < 2)) return null;
  return Math.max(x.min, y.min) <= Math.min(x.max, y.max);
}

/** The minimum and maximum over the repeats of a figure; empty for a single run. */
function repeatRange(point, name) {
  const range = point.ranges[name];
  return range && range.n > 1 ? { low: range.min, high: range.max } : {};
}

/** Pairs each point that recomputes with the point that differs in recomputation only. */
function pairsOf(points) {
  const pairs = [];
  const without = SETTING_AXES.filter((axis) => axis !== "batch" && axis !== "accumulate");
  for (const alike of groupBy(points, (p) => axesKey(p.axes, without)).values()) {
    const plain = alike.filter((p) => p.axes.recompute === "none");
    const base = plain.find((p) => p.axes.memory == null) || plain[0];
    if (!base) continue;
    for (const point of alike) {
      if (point.axes.recompute == null || point.axes.recompute === "none") continue;
      pairs.push({
        base,
        point,
        kept: fall(base.kept, point.kept),
        peak: fall(base.peak, point.peak),
        time: paid(base.samples_per_s, point.samples_per_s),
        time_noise: withinNoise(base, point, "samples_per_s"),
      });
    }
  }
  return pairs;
}

/** The operation at which the peak occurs most often: {phase, stage, n, of}. */
function commonMoment(points) {
  const known = points.filter((p) => momentText(p.peak_at));
  if (known.length === 0) return null;
  const groups = [...groupBy(known, (p) => momentText(p.peak_at)).entries()];
  groups.sort((a, b) => b[1].length - a[1].length || compareNatural(a[0], b[0]));
  const { phase, stage } = groups[0][1][0].peak_at;
  return { phase, stage: stage || "", n: groups[0][1].length, of: known.length };
}

function pairSummary(pairs) {
  const repeated = pairs.filter((p) => p.time_noise != null);
  return {
    n: pairs.length,
    kept: spread(pairs.map((p) => p.kept)),
    peak: spread(pairs.map((p) => p.peak)),
    time: spread(pairs.map((p) => p.time)),
    repeated: repeated.length,
    within_noise: repeated.filter((p) => p.time_noise).length,
    without_at: commonMoment(pairs.map((p) => p.base)),
    with_at: commonMoment(pairs.map((p) => p.point)),
  };
}

/** Ways to lower the peak at one global batch, compared with the largest micro-batch without
 *  recomputation. If a way has several settings, the one with the lowest peak counts. */
const LEVERS = {
  recompute: (p, base) => p.axes.memory == null &&
    p.axes.recompute !== "none" && p.axes.batch === base.axes.batch,
  "micro-batch": (p, base) => p.axes.memory == null &&
    p.axes.recompute === "none" && p.axes.batch < base.axes.batch,
  both: (p, base) => p.axes.memory == null &&
    p.axes.recompute !== "none" && p.axes.batch < base.axes.batch,
  planned: (p) => p.axes.memory != null,
};

function leversOf(points) {
  const usable = points.filter((p) =>
    p.axes.batch != null && p.axes.recompute != null && p.peak != null);
  const groups = groupBy(usable, (p) => axesKey(p.axes, SETTING_AXES) + p.global_batch);
  const found = { recompute: [], "micro-batch": [], both: [], planned: [] };
  for (const alike of groups.values()) {
    const plain = alike.filter((p) =>
      p.axes.recompute === "none" && p.axes.memory == null);
    if (plain.length === 0) continue;
    const base = plain.reduce((a, b) => (b.axes.batch > a.axes.batch ? b : a));
    for (const [lever, applies] of Object.entries(LEVERS)) {
      const ways = alike.filter((p) => applies(p, base));
      if (ways.length === 0) continue;
      const point = ways.reduce((a, b) => (b.peak < a.peak ? b : a));
      found[lever].push({
        base,
        point,
        peak: fall(base.peak, point.peak),
        time: paid(base.samples_per_s, point.samples_per_s),
      });
    }
  }
  return Object.entries(found).filter(([, steps]) => steps.length).map(([lever, steps]) => {
    const most = steps.reduce((a, b) => (b.peak > a.peak ? b : a));
    return {
      lever,
      n: steps.length,
      peak: spread(steps.map((s) => s.peak)),
      time: spread(steps.map((s) => s.time)),
      most: {
        from: batchText(most.base.axes),
        to: batchText(most.point.axes),
        recompute: most.point.axes.recompute,
        size: sizeText(most.base.axes),
        peak: most.peak,
        time: most.time,
      },
    };
  });
}

/** Powers of two between the lowest and the highest peak; at most six. */
function budgetSteps(peaks) {
  if (peaks.length === 0) return [];
  const first = Math.ceil(Math.log2(Math.min(...peaks)));
  const last = Math.ceil(Math.log2(Math.max(...peaks)));
  const all = [];
  for (let power = first; power <= last; ++power) all.push(2 ** power);
  if (all.length <= 6) return all;
  const step = (all.length - 1) / 5;
  return [0, 1, 2, 3, 4, 5].map((i) => all[Math.round(i * step)]);
}

/** The fastest point within each budget, one row per problem size. In a study of single
 *  techniques, the optimizer is one of the choices. */
function bestInBudgets(points, views) {
  const usable = points.filter((p) => p.peak != null && p.samples_per_s != null);
  const budgets = budgetSteps(usable.map((p) => p.peak));
  const rowAxes = varyingAxes(usable).filter((axis) =>
    !SETTING_AXES.includes(axis) && axis !== "precision" &&
    !(axis === "optimizer" && views.includes("steps")));
  const rows = [...groupBy(usable, (p) =>
    rowAxes.map((axis) => valueText(axis, p.axes[axis])).join(" · ")).entries()];
  rows.sort((a, b) => compareNatural(a[0], b[0]));
  return {
    budgets,
    rows: rows.map(([row, all]) => ({
      row,
      cells: budgets.map((budget) => {
        const inside = all.filter((p) => p.peak <= budget);
        if (inside.length === 0) return null;
        const best = inside.reduce((a, b) =>
          (b.samples_per_s > a.samples_per_s ? b : a));
        const shown = varyingAxes(all).filter((axis) => !SIZE_AXES.includes(axis));
        return {
          setting: settingText(best.axes, shown),
          samples_per_s: best.samples_per_s,
          peak: best.peak,
        };
      }),
    })),
  };
}

/** The summary of each study, device and model. */
function summariesOf(studies, points) {
  const out = [];
  for (const study of studies) {
    const own = points.filter((p) =>
      p.axes.study === study.key && p.axes.system === "reprise");
    for (const model of valuesOf(own, "model")) {
      for (const device of valuesOf(own, "device")) {
        const here = own.filter((p) =>
          p.axes.model === model && p.axes.device === device);
        if (here.length === 0) continue;
        out.push(summaryOf(study, device, model, here));
      }
    }
  }
  return out;
}

function summaryOf(study, device, model, points) {
  const pairs = pairsOf(points);
  const ways = valuesOf(pairs.map((p) => p.point), "recompute");
  const ofWay = (way) => pairs.filter((p) => p.point.axes.recompute === way);
  const sizes = [...new Set(pairs.map((p) => sizeText(p.point.axes)))];
  sizes.sort(compareNatural);
  return {
    study: study.key,
    device,
    model,
    points: points.length,
    strategies: ways.map((way) => ({ recompute: way, ...pairSummary(ofWay(way)) })),
    sizes: sizes.length < 2 ? [] : ways.flatMap((way) => sizes.map((size) => ({
      size,
      recompute: way,
      ...pairSummary(ofWay(way).filter((p) => sizeText(p.point.axes) === size)),
    })).filter((row) => row.n > 0)),
    levers: leversOf(points),
    best: bestInBudgets(points, study.views),
  };
}

/** The Pareto-optimal points in peak and time, sorted by peak. */
function paretoOf(points) {
  const sorted = points
    .filter((p) => p.peak != null && p.samples_per_s != null)
    .sort((a, b) => a.peak - b.peak || b.samples_per_s - a.samples_per_s);
  const front = [];
  for (const point of sorted) {
    const last = front[front.length - 1];
    if (!last || point.samples_per_s > last.samples_per_s) front.push(point);
  }
  return front;
}

/** The lines of a study's plots (see lineRows()), with the axis for the size of each model. */
function gridRows(points, axes, value) {
  return valuesOf(points, "model").flatMap((model) => {
    const own = points.filter((p) => p.axes.model === model);
    const size = sizeAxis(own);
    return lineRows(own, ["device", "model", "optimizer", "ranks", size, "recompute", "batch",
      ...axes], value)
      .map((row) => ({ ...row, size }));
  });
}

/** The lines of plots: the median over all axes that are not shown; `low` and `high` are the
 *  range of the repeats if there is only one case. */
function lineRows(points, axes, value) {
  const usable = points.filter((p) => p[value] != null);
  return [...groupBy(usable, (p) => JSON.stringify(axes.map((a) => p.axes[a] ?? null))).values()]
    .map((group) => ({
      ...Object.fromEntries(axes.map((a) => [a, group[0].axes[a] ?? null])),
      value: median(group.map((p) => p[value])),
      n: group.length,
      ...(group.length === 1 ? repeatRange(group[0], value) : {}),
    }));
}

/** The size axis of a model's lines: the one with the most values. */
function sizeAxis(points) {
  const counts = SIZE_AXES.map((axis) => [axis, valuesOf(points, axis).length]);
  counts.sort((a, b) => b[1] - a[1]);
  return counts[0][1] > 0 ? counts[0][0] : "model";
}

/** The published row that corresponds to a run: it has the label of the run or no label, and
 *  the same values. */
function publishedFor(reference, { axes, label }) {
  const isFor = (row) => {
    const values = Object.entries(row.case || {});
    const named = row.label != null && label != null;
    if (named ? row.label !== label : values.length === 0) return false;
    return values.every(([axis, value]) => String(axes[axis]) === String(value));
  };
  return ((reference && reference.rows) || []).find(isFor) || null;
}

/** The range of the time ratio of a point over its repeats. */
function timeRatioRange(base, point) {
  const { low, high } = repeatRange(point, "samples_per_s");
  if (low == null || !base || !base.samples_per_s) return {};
  return { time_low: base.samples_per_s / high, time_high: base.samples_per_s / low };
}

/** One table of recomputation strategies for each combination of the other axes. */
function checkpointTables(study, points) {
  const groups = groupBy(points, (p) => axesKey(p.axes, ["recompute", "memory"]));
  return [...groups.values()].filter((group) => group.length > 1).map((group) => {
    const base = group.find((p) => p.axes.recompute === "none") || null;
    const rows = [...group].sort((a, b) =>
      (b === base) - (a === base) || (a.kept ?? 0) - (b.kept ?? 0)).map((p) => {
      const published = publishedFor(study.reference, p) || {};
      return {
        recompute: p.axes.recompute,
        kept: p.kept,
        kept_ratio: base && base.kept && p.kept != null ? p.kept / base.kept : null,
        kept_published: number(published.kept_ratio),
        peak: p.peak,
        peak_ratio: base && base.peak && p.peak != null ? p.peak / base.peak : null,
        peak_published: number(published.peak_ratio),
        step_ms: p.step_ms,
        step_low: repeatRange(p, "step_ms").low ?? null,
        step_high: repeatRange(p, "step_ms").high ?? null,
        time_ratio: base && base.samples_per_s && p.samples_per_s
          ? base.samples_per_s / p.samples_per_s : null,
        time_published: number(published.time_ratio),
        time_noise: base && base !== p ? withinNoise(base, p, "samples_per_s") : null,
        ...timeRatioRange(base, p),
        dataset: p.dataset,
        moment: momentText(p.peak_at),
      };
    });
    return { axes: group[0].axes, rows };
  });
}

const SHARD_LEVELS = ["none", "optimizer", "gradients", "parameters"];

/** Ranks, what they divide and their budget, for each combination of the other axes. */
function rankTables(points) {
  const varied = ["ranks", "shard", "shard_group", "memory", "batch", "accumulate", "recompute"];
  const ratio = (a, b) => (a != null && b ? a / b : null);
  const first = (p, value) => {
    const known = p.runs.map((run) => number(value(run.record))).filter((x) => x != null);
    return known.length ? median(known) : null;
  };
  const exchanged = ({ figures }) => (figures.steps > 0 && figures.reduce_bytes != null
    ? (figures.reduce_bytes + (figures.gather_bytes ?? 0)) / figures.steps : null);
  const predicted = (record) => (record.figures && record.figures.predicted) || record.predicted || {};
  return [...groupBy(points, (p) => axesKey(p.axes, varied)).values()].map((group) => ({
    axes: group[0].axes,
    rows: group.map((p) => {
      const peakPredicted = first(p, (record) => predicted(record).peak_bytes);
      const stepPredicted = first(p, (record) => predicted(record).step_ms);
      return {
        ranks: p.axes.ranks,
        shard: p.axes.shard ?? "none",
        memory: p.axes.memory ?? null,
        batch: p.axes.batch,
        accumulate: p.axes.accumulate,
        parameters: number(p.memory && p.memory.parameters),
        gradients: number(p.memory && p.memory.gradients),
        optimizer: number(p.memory && p.memory.optimizer),
        peak: p.peak,
        peak_predicted: peakPredicted,
        peak_ratio: ratio(peakPredicted, p.peak),
        step_ms: p.step_ms,
        step_predicted: stepPredicted,
        step_ratio: ratio(stepPredicted, p.step_ms),
        exchanged: first(p, exchanged),
      };
    }).sort((a, b) => a.ranks - b.ranks ||
      SHARD_LEVELS.indexOf(a.shard) - SHARD_LEVELS.indexOf(b.shard) ||
      compareNatural(String(a.memory), String(b.memory))),
  }));
}

/** Rows by label with one column per source: measured systems first, then published figures.
 *  A run that is not done shows its status. */
function stepTables(study, runs) {
  const out = [];
  const points = [...pointsOf(runs), ...runs.filter((run) => run.status !== "done")];
  for (const device of valuesOf(points, "device")) {
    for (const model of valuesOf(points, "model")) {
      const here = points.filter((p) =>
        p.axes.device === device && p.axes.model === model);
      if (here.length === 0) continue;
      const shown = varyingAxes(here).filter((axis) => axis !== "system");
      const nameOf = (p) => p.label || settingText(p.axes, shown);
      const published = (study.reference && study.reference.rows) || [];
      const labels = [];
      const add = (label) => labels.includes(label) || labels.push(label);
      // Rows follow the order of the reference, then that of the runs.
      const used = new Set(here.map(nameOf));
      published.filter((row) => used.has(row.label)).forEach((row) => add(row.label));
      here.forEach((p) => add(nameOf(p)));
      const systems = valuesOf(here, "system");
      systems.sort((a, b) => (b === "reprise") - (a === "reprise"));
      const sources = systems.map((system) => stepSource(system, labels.map((label) => {
        const found = here.find((p) => p.axes.system === system && nameOf(p) === label);
        if (found && found.status) return { status: found.status };
        return found && {
          // Per epoch, since runs may have been cut short.
          time_s: found.epoch_s ?? found.time_s,
          samples_per_s: found.samples_per_s,
          peak: found.peak,
          ...repeatRange(found, found.epoch_s == null ? "time_s" : "epoch_s"),
        };
      })));
      if (published.length) {
        sources.push(stepSource("published", labels.map((label) => {
          const found = here.filter((p) => nameOf(p) === label)
            .map((p) => publishedFor(study.reference, p)).find(Boolean);
          return found && {
            time_s: number(found.time_s),
            samples_per_s: number(found.samples_per_s),
            peak: number(found.peak_bytes),
          };
        })));
      }
      out.push({ device, model, labels, sources });
    }
  }
  return out;
}

function stepSource(name, rows) {
  const first = rows[0] || {};
  const ratio = (a, b) => (a == null || !b ? null : a / b);
  return {
    name,
    rows: rows.map((row) => (row && !row.status ? {
      ...row,
      time_ratio: ratio(row.time_s, first.time_s),
      time_noise: row === first || row.low == null || first.low == null ? null
        : Math.max(row.low, first.low) <= Math.min(row.high, first.high),
      peak_ratio: ratio(row.peak, first.peak),
    } : row || null)),
  };
}

/** All figures of the page, for all runs. */
function computeAll(data) {
  const points = pointsOf(data.runs);
  const counts = { done: 0, oom: 0, failed: 0, skipped: 0 };
  for (const run of data.runs) counts[run.status] = (counts[run.status] || 0) + 1;
  const ofView = (view, make) => data.studies
    .filter((study) => study.views.includes(view))
    .map((study) => ({
      study: study.key,
      ...make(study, points.filter((p) => p.axes.study === study.key)),
    }));
  return {
    counts,
    points: points.length,
    warned: data.runs.filter((run) => run.warnings.length > 0).length,
    verdicts: verdictsOf(data.studies, points),
    summaries: summariesOf(data.studies, points),
    grid: ofView("grid", (study, own) => {
      return {
        memory: gridRows(own, [], "peak"),
        kept: gridRows(own, [], "kept"),
        utilisation: gridRows(own, [], "utilisation"),
        time: gridRows(own, ["accumulate"], "epoch_s"),
      };
    }),
    checkpoints: ofView("checkpoints", (study, own) => ({
      tables: checkpointTables(study, own),
    })),
    ranks: ofView("ranks", (study, own) => ({ tables: rankTables(own) })),
    steps: ofView("steps", (study) => ({
      tables: stepTables(study, data.runs.filter((run) => run.axes.study === study.key)),
    })),
    frontier: data.studies.map((study) => ({
      study: study.key,
      front: frontGroups(points.filter((p) => p.axes.study === study.key))
        .flatMap((group) => paretoOf(group).map((p) => ({
          device: p.axes.device,
          model: p.axes.model,
          size: sizeText(p.axes),
          peak: p.peak,
          samples_per_s: p.samples_per_s,
        }))),
    })),
  };
}

/** Groups of points that are comparable in time and memory: one device, model and size. */
function frontGroups(points) {
  const groups = [...groupBy(points, (p) =>
    JSON.stringify([p.axes.device, p.axes.model, sizeText(p.axes)])).entries()];
  return groups.sort((a, b) => compareNatural(a[0], b[0])).map(([, group]) => group);
}
