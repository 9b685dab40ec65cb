// Provenance of the figures: versions, devices and dates.

/** "Reprise 0.1.0, LibTorch 2.11.0"; null if unknown. */
function versionsText(versions) {
  const names = { libtorch: "LibTorch", reprise: "Reprise" };
  const words = Object.entries(versions || {}).map(([name, version]) => `${names[name] || name} ${version}`);
  return words.length ? words.join(", ") : null;
}

/** The first and last start time of runs; null if unknown. */
function startedText(runs) {
  const times = runs.map((run) => run.record.started).filter((t) => dateText(t)).sort();
  if (times.length === 0) return null;
  const [first, last] = [dateText(times[0]), dateText(times[times.length - 1])];
  const day = (text) => text.split(", ")[0];
  return day(first) === day(last) ? `run on ${day(first)}` : `run from ${day(first)} to ${day(last)}`;
}

/** "mnist-h200 · NVIDIA H200 · run on 15 Nov 2026 · Reprise 0.1.0, LibTorch 2.11.0", to
 *  distinguish studies with the same title. Without a study, describes the whole page. */
function provenanceText(study, runs) {
  const versions = [...new Set(runs.map((run) => versionsText(run.record.versions)).filter(Boolean))];
  return [study && study.sources.filter(Boolean).join(", "), valuesOf(runs, "device").join(", "), startedText(runs), versions.join("; ")]
    .filter(Boolean).join(" · ");
}
