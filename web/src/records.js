// Converts records of results.jsonl into runs with axes, and repeats of a run into
// points.

/** Axes in the order in which they are shown. */
const AXES = [
  "study", "device", "system", "model", "image_size", "seq", "depth", "width",
  "norm", "data", "batch", "accumulate", "ranks", "global_batch", "optimizer", "recompute",
  "precision", "memory",
];

/** Display names of the axes. */
const AXIS_NAMES = {
  image_size: "image size",
  seq: "sequence",
  batch: "micro-batch",
  accumulate: "accumulation",
  global_batch: "global batch",
  recompute: "recomputation",
  memory: "budget",
};

/** Axes for the size of the problem, as opposed to the settings. */
const SIZE_AXES = ["image_size", "seq", "depth", "width"];

/** Axes for the settings: those that may differ between two compared runs. */
const SETTING_AXES = [
  "recompute", "memory", "batch", "accumulate", "global_batch", "steps", "epochs", "seconds",
];

/** Settings that a study of single techniques varies as well. */
const TECHNIQUE_AXES = ["optimizer", "precision"];

const STATUS_WORDS = { oom: "out of memory", failed: "failed", skipped: "skipped" };

const number = (x) => (typeof x === "number" && Number.isFinite(x) ? x : null);

function axisName(axis) {
  return AXIS_NAMES[axis] || axis.replace(/_/g, " ");
}

/** Flattens one record of a run. Values that the case leaves open are taken from the figures;
 *  the micro-batch is the actual one, even if the case requested another. `study` is the key
 *  of the study; `prefix` makes the ids of several directories unique. */
function runOf(record, study, prefix) {
  const figures = record.figures || {};
  const observed = record.observed || {};
  const axes = { ...record.case };
  const micro = figures.micro_batch ?? axes.batch;
  if (micro != null) axes.batch = micro;
  const accumulate = figures.accumulate ?? axes.accumulate;
  if (accumulate != null) axes.accumulate = accumulate;
  // A budget without a strategy leaves the schedule to the planner, which may choose another
  // one for each budget.
  if (axes.memory != null && axes.recompute == null) axes.recompute = "planned";
  for (const axis of ["model", "optimizer", "recompute", "precision"]) {
    if (axes[axis] == null && figures[axis] != null) axes[axis] = figures[axis];
  }
  if (axes.batch != null && axes.accumulate == null) axes.accumulate = 1;
  axes.ranks = figures.ranks ?? axes.ranks ?? 1;
  // It follows from the other two and would only add a filter.
  if (axes.batch != null) delete axes.global_batch;
  axes.study = study;
  axes.system = record.system || "reprise";
  axes.device = (record.device && record.device.name) || "unknown device";
  return {
    record,
    id: prefix + record.id,
    axes,
    label: record.label || null,
    status: record.status,
    figures: {
      peak: number(figures.peak_bytes),
      kept: number(figures.kept_bytes),
      reserved: number(figures.reserved_bytes) || null,
      seen: number(observed.peak && observed.peak.memory_bytes),
      utilisation: number(observed.average && observed.average.utilisation),
      samples_per_s: number(figures.samples_per_s) || null,
      step_ms: number(figures.step_ms),
      epoch_s: number(figures.epoch_s),
      time_s: number(figures.time_s),
      dataset: number(figures.dataset_bytes) || null,
    },
    // Samples per update: the micro-batches of a plan need not divide it.
    global_batch: number(figures.global_batch) ?? number(record.case && record.case.global_batch) ??
      (axes.batch == null ? null : axes.batch * axes.accumulate * axes.ranks),
    warnings: Array.isArray(figures.warnings) ? figures.warnings.map(String) : [],
    memory: figures.memory || null,
    peak_at: figures.peak_at || null,
  };
}

/** The name of a record's study. Directories with the same study on different devices, with
 *  different systems or with different runs are shown together. If two directories contain
 *  the same run, the study was repeated, and the directory becomes part of the name. */
function studyKeys(records) {
  const places = new Map();
  for (const record of records.filter((r) => r.type === "run")) {
    const place = JSON.stringify([record.study, record.device && record.device.name,
      record.system || "reprise", record.id]);
    if (!places.has(place)) places.set(place, new Set());
    places.get(place).add(record.source);
  }
  const again = new Set([...places].filter(([, sources]) => sources.size > 1)
    .map(([place]) => JSON.parse(place)[0]));
  return ({ study, source }) => (again.has(study) ? `${study} (${source})` : study);
}

/** {studies, runs} of all records; the last run with a given id in a study counts. The `key`
 *  and the `name` of a study are unique. */
function readRecords(records) {
  const keyOf = studyKeys(records);
  const studies = new Map();
  const runs = new Map();
  for (const record of records) {
    const key = keyOf(record);
    if (record.type === "study") {
      const before = studies.get(key);
      const views = new Set([...(before ? before.views : []), ...(record.views || [])]);
      studies.set(key, {
        ...record,
        key,
        reference: record.reference || (before && before.reference) || null,
        views: [...views],
        sources: [...new Set([...(before ? before.sources : []), record.source])],
      });
    } else if (record.type === "run") {
      const prefix = key === record.study ? "" : `${record.source}/`;
      // A repeated run keeps its position.
      runs.set(prefix + record.id, runOf(record, key, prefix));
      if (!studies.has(key)) {
        studies.set(key, { study: record.study, key, title: record.study, views: [],
          reference: null, sources: [record.source] });
      }
    }
  }
  const all = [...studies.values()];
  for (const study of all) {
    study.name = study.title || study.study;
    if (all.some((s) => s !== study && (s.title || s.study) === study.name)) {
      study.name += ` (${study.key === study.study ? study.study : study.sources[0]})`;
    }
  }
  return { studies: all, runs: [...runs.values()] };
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

/** {median, min, max, n}; null for an empty list. */
function spread(values) {
  const known = values.filter((x) => x != null);
  if (known.length === 0) return null;
  return {
    median: median(known),
    min: Math.min(...known),
    max: Math.max(...known),
    n: known.length,
  };
}

function groupBy(items, keyOf) {
  const groups = new Map();
  for (const item of items) {
    const key = keyOf(item);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(item);
  }
  return groups;
}

/** A key of all axes except the given ones. */
function axesKey(axes, without = []) {
  return JSON.stringify(
    Object.keys(axes)
      .filter((axis) => !without.includes(axis) && axes[axis] != null)
      .sort()
      .map((axis) => [axis, String(axes[axis])]),
  );
}

/** Groups the repeats of each finished case into a point: the median of every figure, with the
 *  minimum and maximum in `ranges`. The operation at the peak is that of the repeat with the
 *  highest peak. */
function pointsOf(runs) {
  const done = runs.filter((run) => run.status === "done" && run.record.figures);
  const points = [];
  for (const repeats of groupBy(done, (run) => axesKey(run.axes)).values()) {
    const highest = repeats.reduce((a, b) =>
      (b.figures.peak ?? 0) > (a.figures.peak ?? 0) ? b : a);
    const point = {
      axes: repeats[0].axes,
      label: repeats[0].label,
      runs: repeats,
      ranges: {},
      global_batch: repeats[0].global_batch,
      warnings: [...new Set(repeats.flatMap((run) => run.warnings))],
      memory: highest.memory,
      peak_at: highest.peak_at,
    };
    for (const name of Object.keys(repeats[0].figures)) {
      const known = repeats.map((run) => run.figures[name]).filter((x) => x != null);
      point[name] = known.length ? median(known) : null;
      point.ranges[name] = spread(known);
    }
    points.push(point);
  }
  return points;
}

/** The sorted values of an axis; "none" is the first recomputation strategy. */
function valuesOf(items, axis) {
  const values = new Set(items.map((item) => item.axes[axis]).filter((v) => v != null));
  return [...values].sort((a, b) =>
    (b === "none") - (a === "none") || compareNatural(a, b));
}

/** Axes with more than one value. */
function varyingAxes(items) {
  const known = new Set(items.flatMap((item) => Object.keys(item.axes)));
  const ordered = [...AXES.filter((axis) => known.has(axis)),
    ...[...known].filter((axis) => !AXES.includes(axis)).sort()];
  return ordered.filter((axis) => valuesOf(items, axis).length > 1);
}

/** Axes with filters. Minor axes, such as the learning rate, are included only if a single
 *  study varies them. */
function filterAxes(runs) {
  const within = new Set([...groupBy(runs, (run) => run.axes.study).values()].flatMap(varyingAxes));
  return varyingAxes(runs).filter((axis) => AXES.includes(axis) || within.has(axis));
}

function valueText(axis, value) {
  if (value == null) return "–";
  if (axis === "image_size") return `${value}${NO_BREAK}px`;
  if (axis === "seq") return `${value} tokens`;
  if (axis === "depth") return `depth ${value}`;
  if (axis === "width") return `width ${value}`;
  if (axis === "ranks") return `${value}${NO_BREAK}${value > 1 ? "ranks" : "rank"}`;
  return String(value);
}

/** The size of the problem: "448 px", "depth 64"; empty if unknown. */
function sizeText(axes) {
  return SIZE_AXES.filter((axis) => axes[axis] != null)
    .map((axis) => valueText(axis, axes[axis])).join(", ");
}

function batchText(axes) {
  if (axes.batch == null) return "";
  const ranks = axes.ranks > 1 ? `${NO_BREAK}×${NO_BREAK}${axes.ranks}${NO_BREAK}ranks` : "";
  return `${axes.batch}${NO_BREAK}×${NO_BREAK}${axes.accumulate ?? 1}${ranks}`;
}

/** The settings, restricted to the axes in `axesShown`. */
function settingText(axes, axesShown) {
  const words = [];
  const size = sizeText(Object.fromEntries(
    SIZE_AXES.filter((axis) => axesShown.includes(axis)).map((a) => [a, axes[a]])));
  if (size) words.push(size);
  if (axes.batch != null) words.push(batchText(axes));
  for (const axis of ["model", "system", "optimizer", "precision", "norm", "data"]) {
    if (axesShown.includes(axis) && axes[axis] != null) words.push(axes[axis]);
  }
  if (axes.memory != null) words.push(`in ${axes.memory}`);
  if (axes.recompute != null) words.push(axes.recompute);
  return words.join(" · ");
}

/** "the backward of block1"; null if unknown. */
function momentText(peakAt) {
  if (!peakAt || !peakAt.phase) return null;
  return peakAt.stage ? `${peakAt.phase} of ${peakAt.stage}` : peakAt.phase;
}

/** The columns that describe the case in a CSV row. */
function caseColumns(axes) {
  return Object.fromEntries(AXES.filter((axis) => axes[axis] != null).map((axis) => [axis, axes[axis]]));
}
