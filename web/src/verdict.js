// The recommended setting, computed by pure functions of the points.
//
// Settings are comparable if they do the same work: everything except the settings,
// including
// the global batch, is equal. The baseline is the largest micro-batch without
// recomputation.
// The recommendation minimizes the product of peak and time, which falls if memory
// falls by a
// larger factor than time grows.

/** A setting slower than this factor × the baseline is not recommended. */
const MOST_TIME = 1.5;
/** The minimum relative reduction of the product; otherwise the baseline is recommended. */
const LEAST_GAIN = 0.05;

/** Axes in which settings of the same work may differ. */
function choiceAxes(study) {
  return [...SETTING_AXES, ...(study.views.includes("steps") ? TECHNIQUE_AXES : [])];
}

/** Groups the points of one study, device and model by work. */
function sameWork(study, points) {
  const usable = points.filter((p) => p.axes.batch != null && p.axes.recompute != null &&
    p.peak > 0 && p.samples_per_s > 0);
  return [...groupBy(usable, (p) =>
    axesKey(p.axes, choiceAxes(study)) + p.global_batch).values()];
}

const isPlain = (p) => p.axes.recompute === "none" && p.axes.memory == null;

/** Compares a point with the baseline. */
function comparison(base, point) {
  return {
    peak: fall(base.peak, point.peak),
    time: paid(base.samples_per_s, point.samples_per_s),
    peak_noise: point === base ? null : withinNoise(base, point, "peak"),
    time_noise: point === base ? null : withinNoise(base, point, "samples_per_s"),
    product: (point.peak / base.peak) * (base.samples_per_s / point.samples_per_s),
  };
}

/** Whether the point is better by more than the noise. */
function isGain({ peak, time, peak_noise, time_noise, product }) {
  const lower = peak > 0 && !peak_noise;
  const faster = time < 0 && !time_noise;
  return product <= 1 - LEAST_GAIN && (lower || faster);
}

/** {base, pick, ...} for settings with the same work; null without a baseline or another
 *  setting. `pick` is the baseline if no setting is better. */
function verdictOf(points) {
  const trusted = points.filter((p) => p.warnings.length === 0);
  const plain = trusted.filter(isPlain);
  if (plain.length === 0 || trusted.length < 2) return null;
  const base = plain.reduce((a, b) => (b.axes.batch > a.axes.batch ? b : a));
  const better = trusted
    .map((point) => ({ point, ...comparison(base, point) }))
    .filter((c) => c.time <= MOST_TIME - 1 && isGain(c));
  const best = better.length === 0 ? null
    : better.reduce((a, b) => (b.product < a.product ? b : a));
  const pick = best ? best.point : base;
  return { points, base, pick, warned: points.length - trusted.length, ...comparison(base, pick) };
}

/** The figures that the page shows for one point of a verdict. */
function verdictPoint(p) {
  return {
    batch: batchText(p.axes),
    recompute: p.axes.recompute,
    memory: p.axes.memory ?? null,
    optimizer: p.axes.optimizer ?? null,
    precision: p.axes.precision ?? null,
    peak: p.peak,
    ms: 1000 / p.samples_per_s,
    dataset: p.dataset,
  };
}

/** The verdicts of one study, device and model. The work with the most settings comes first
 *  or, among equals, the one whose baseline has the highest peak. */
function verdictCases(study, points) {
  const found = sameWork(study, points).map(verdictOf).filter(Boolean);
  const choices = (v) => v.points.length - v.warned;
  return found.sort((a, b) => choices(b) - choices(a) || b.base.peak - a.base.peak);
}

/** The figures that the page shows for a verdict; `size`, `optimizer` and `global_batch`
 *  identify the work. */
function statedVerdict({ base, pick, points, warned, peak, time, peak_noise, time_noise }) {
  return {
    size: sizeText(base.axes),
    optimizer: base.axes.optimizer ?? null,
    precision: base.axes.precision ?? null,
    ranks: base.axes.ranks,
    global_batch: base.global_batch,
    settings: points.length - warned,
    warned,
    repeats: Math.max(...points.map((p) => p.runs.length)),
    keep: pick === base,
    base: verdictPoint(base),
    pick: verdictPoint(pick),
    peak,
    time,
    peak_noise,
    time_noise,
  };
}

/** The verdicts of all studies, devices and models that have one. */
function verdictsOf(studies, points) {
  return verdictGroups(studies, points).map(({ study, device, model, cases }) => ({
    study: study.key,
    device,
    model,
    cases: cases.map(statedVerdict),
  }));
}

/** The same verdicts with their points, for the chart. */
function verdictGroups(studies, points) {
  return studies.flatMap((study) => {
    const own = points.filter((p) => p.axes.study === study.key && p.axes.system === "reprise");
    return valuesOf(own, "model").flatMap((model) => valuesOf(own, "device").map((device) => ({
      study,
      device,
      model,
      cases: verdictCases(study, own.filter((p) =>
        p.axes.model === model && p.axes.device === device)),
    })));
  }).filter((group) => group.cases.length > 0);
}
