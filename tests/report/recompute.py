"""Independent computation of the figures of a page from results.jsonl.

Shares no code with the page; both follow docs/results.md. `expected(paths)` returns the
figures that the page must show, keyed by names instead of list indices.
"""
import decimal
import json
import math
import pathlib
import re
import statistics

import verdict

SIZES = {"image_size": "{}\u00a0px", "seq": "{} tokens", "depth": "depth {}",
         "width": "width {}"}
CHOICES = verdict.CHOICES


def read(paths):
    """The records of all complete lines, each with the name of its directory."""
    for path in map(pathlib.Path, paths):
        file = path / "results.jsonl" if path.is_dir() else path
        for line in file.read_bytes().split(b"\n")[:-1]:
            if line:
                yield json.loads(line) | {"source": file.resolve().parent.name}


def load(paths):
    """(studies by name, runs); the last run of an id counts. If two directories of a study
    have the same run on one device, its name contains the directory."""
    studies, runs, places = {}, {}, {}
    records = list(read(paths))
    for record in records:
        if record["type"] == "run":
            place = (record["study"], record["device"]["name"], record["system"],
                     record["id"])
            places.setdefault(place, set()).add(record["source"])
    again = {place[0] for place, sources in places.items() if len(sources) > 1}
    for record in records:
        source = record["source"] if record["study"] in again else ""
        if source:
            record["study"] += f" ({source})"
        if record["type"] == "study":
            before = studies.get(record["study"], {"views": []})
            record["views"] = sorted(set(before["views"]) |
                                     set(record["views"]))
            record["reference"] = (record.get("reference")
                                   or before.get("reference"))
            studies[record["study"]] = record
        elif record["type"] == "run":
            runs[source, record["id"]] = record
    return studies, list(runs.values())


def settings(run):
    """The axes that identify a case, with the values that were actually run."""
    figures = run["figures"] or {}
    case = dict(run["case"])
    for name, key in (("batch", "micro_batch"), ("accumulate", "accumulate"),
                      ("ranks", "ranks")):
        if figures.get(key) is not None:
            case[name] = figures[key]
    if case.get("memory") is not None and case.get("recompute") is None:
        case["recompute"] = "planned"
    for name in ("model", "optimizer", "recompute", "precision"):
        if case.get(name) is None and figures.get(name) is not None:
            case[name] = figures[name]
    if case.get("batch") is not None:
        case.setdefault("accumulate", 1)
        case.pop("global_batch", None)
    case.setdefault("ranks", 1)
    return {k: v for k, v in case.items() if v is not None}


def middle(values):
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


class Point:
    """Groups the repeats of each case."""

    def __init__(self, runs):
        first = runs[0]
        self.runs = runs
        self.case = settings(first)
        self.study, self.system = first["study"], first["system"]
        self.device = first["device"]["name"]
        self.label = first["label"]

        self.repeats = {}

        def of(name, *keys):
            found = []
            for run in runs:
                value = run
                for key in keys:
                    value = (value or {}).get(key)
                found.append(value)
            self.repeats[name] = [v for v in found if v is not None]
            return middle(found)

        self.warnings = {w for run in runs for w in run["figures"].get("warnings", [])}
        self.dataset = of("dataset", "figures", "dataset_bytes")
        self.global_batch = first["figures"].get("global_batch")
        if self.global_batch is None and "batch" in self.case:
            self.global_batch = (self.case["batch"] * self.case["accumulate"]
                                 * self.case["ranks"])
        self.peak = of("peak", "figures", "peak_bytes")
        self.kept = of("kept", "figures", "kept_bytes")
        self.speed = of("speed", "figures", "samples_per_s")
        self.step_ms = of("step_ms", "figures", "step_ms")
        self.epoch_s = of("epoch_s", "figures", "epoch_s")
        self.time_s = of("time_s", "figures", "time_s")
        self.utilisation = of("utilisation", "observed", "average", "utilisation")
        top = max(run["figures"].get("peak_bytes") or 0 for run in runs)
        at = next(run["figures"].get("peak_at") for run in runs
                  if (run["figures"].get("peak_bytes") or 0) == top)
        self.moment = (at["phase"], at.get("stage") or "") if at else None

    def without(self, *names):
        return frozenset((k, str(v)) for k, v in self.case.items()
                         if k not in names)

    def size(self):
        return ", ".join(text.format(self.case[name])
                         for name, text in SIZES.items() if name in self.case)

    def way(self):
        return self.case.get("recompute")

    def batches(self):
        ranks = self.case["ranks"]
        return "{}\u00a0×\u00a0{}{}".format(
            self.case["batch"], self.case["accumulate"],
            f"\u00a0×\u00a0{ranks}\u00a0ranks" if ranks > 1 else "")


def points_of(runs):
    groups = {}
    for run in runs:
        if run["status"] == "done" and run["figures"]:
            key = (run["study"], run["system"], run["device"]["name"],
                   frozenset((k, str(v)) for k, v in settings(run).items()))
            groups.setdefault(key, []).append(run)
    return [Point(group) for group in groups.values()]


def spread(values):
    known = [v for v in values if v is not None]
    if not known:
        return None
    return {"median": statistics.median(known), "min": min(known),
            "max": max(known), "n": len(known)}


def fell(before, after):
    return None if not before or after is None else 1 - after / before


def dearer(before, after):
    return None if before is None or after is None else before / after - 1


def pairs_of(points):
    """Pairs (without, with) that differ only in recomputation."""
    found = []
    for point in points:
        if point.way() in (None, "none"):
            continue
        apart = [name for name in CHOICES if name not in ("batch", "accumulate")]
        plain = [p for p in points if p.way() == "none"
                 and p.without(*apart) == point.without(*apart)]
        plain.sort(key=lambda p: "memory" in p.case)
        if plain:
            found.append((plain[0], point))
    return found


def moment(points):
    known = [p.moment for p in points if p.moment]
    if not known:
        return None
    counts = {m: known.count(m) for m in known}
    most = max(counts.values())
    # Among equals, the first by name.
    best = min((m for m in counts if counts[m] == most),
               key=lambda m: natural(f"{m[0]} of {m[1]}" if m[1] else m[0]))
    return {"phase": best[0], "stage": best[1], "n": most, "of": len(known)}


def natural(text):
    return [(0, int(part), "") if part.isdigit() else (1, 0, part)
            for part in re.split(r"(\d+)", text.lower()) if part]


def pair_figures(pairs):
    return {"n": len(pairs),
            "kept": spread([fell(a.kept, b.kept) for a, b in pairs]),
            "peak": spread([fell(a.peak, b.peak) for a, b in pairs]),
            "time": spread([dearer(a.speed, b.speed) for a, b in pairs]),
            "repeated": sum(verdict.within_noise(a, b, "speed") is not None
                            for a, b in pairs),
            "within_noise": sum(bool(verdict.within_noise(a, b, "speed"))
                                for a, b in pairs),
            "without_at": moment([a for a, _ in pairs]),
            "with_at": moment([b for _, b in pairs])}


def levers(points):
    """Comparisons with the largest micro-batch without recomputation at one global batch."""
    cases = {"recompute": [], "micro-batch": [], "both": [], "planned": []}
    groups = {}
    for p in points:
        if "batch" in p.case and p.way() and p.peak is not None:
            key = (p.without(*CHOICES), p.global_batch)
            groups.setdefault(key, []).append(p)
    for group in groups.values():
        plain = [p for p in group if p.way() == "none" and "memory" not in p.case]
        if not plain:
            continue
        base = max(plain, key=lambda p: p.case["batch"])
        free = [p for p in group if "memory" not in p.case]
        for name, chosen in (
                ("recompute", [p for p in free if p.way() != "none"
                               and p.case["batch"] == base.case["batch"]]),
                ("micro-batch", [p for p in free if p.way() == "none"
                                 and p.case["batch"] < base.case["batch"]]),
                ("both", [p for p in free if p.way() != "none"
                          and p.case["batch"] < base.case["batch"]]),
                ("planned", [p for p in group if "memory" in p.case])):
            if chosen:
                cases[name].append((base, min(chosen, key=lambda p: p.peak)))
    out = {}
    for name, steps in cases.items():
        if steps:
            base, best = max(steps, key=lambda s: fell(s[0].peak, s[1].peak))
            out[name] = {
                "n": len(steps),
                "peak": spread([fell(a.peak, b.peak) for a, b in steps]),
                "time": spread([dearer(a.speed, b.speed) for a, b in steps]),
                "most": {"from": base.batches(), "to": best.batches(),
                         "recompute": best.way(), "size": base.size(),
                         "peak": fell(base.peak, best.peak),
                         "time": dearer(base.speed, best.speed)}}
    return out


def budgets(points, views):
    """{budget: {values of the row: (fastest, its peak)}}."""
    usable = [p for p in points if p.peak is not None and p.speed is not None]
    first = math.ceil(math.log2(min(p.peak for p in usable)))
    last = math.ceil(math.log2(max(p.peak for p in usable)))
    steps = [2 ** power for power in range(first, last + 1)]
    if len(steps) > 6:
        steps = [steps[math.floor(i * (len(steps) - 1) / 5 + 0.5)] for i in range(6)]
    apart = set(CHOICES) | {"precision"}
    if "steps" in views:
        apart.add("optimizer")
    rows = {}
    for p in usable:
        rows.setdefault(p.without(*apart), []).append(p)
    table = []
    for row in rows.values():
        cells = []
        for budget in steps:
            inside = [p for p in row if p.peak <= budget]
            best = max(inside, key=lambda p: p.speed) if inside else None
            cells.append(best and [best.speed, best.peak])
        table.append(cells)
    return steps, table


def front(points):
    """The Pareto-optimal points in peak and time."""
    kept = set()
    for p in points:
        if p.peak is None or p.speed is None:
            continue
        if not any(q is not p and q.peak is not None and q.speed is not None
                   and q.peak <= p.peak and q.speed >= p.speed
                   and (q.peak, q.speed) != (p.peak, p.speed) for q in points):
            kept.add((p.peak, p.speed))
    return kept


def grid(points):
    """Medians over all axes that are not shown: {figure: {axes: (value, n)}}."""
    sizes = {}
    for model in {p.case["model"] for p in points}:
        counts = {name: len({p.case[name] for p in points if name in p.case
                             and p.case["model"] == model}) for name in SIZES}
        most = max(counts, key=lambda name: counts[name])
        sizes[model] = most if counts[most] else "model"
    out = {}
    for what, value, axes in (
            ("memory", "peak", ()), ("kept", "kept", ()),
            ("utilisation", "utilisation", ()), ("time", "epoch_s", ("accumulate",))):
        groups = {}
        for p in points:
            if getattr(p, value) is not None:
                size = sizes[p.case["model"]]
                key = (p.device, p.case["model"], p.case.get("optimizer"),
                       p.case["ranks"], size,
                       *(p.case.get(a) for a in (size, "recompute", "batch", *axes)))
                groups.setdefault(key, []).append(p)
        out[what] = {}
        for key, alike in groups.items():
            # The range of the repeats if the value belongs to one case.
            repeats = alike[0].repeats[value] if len(alike) == 1 else []
            out[what][key] = {"value": middle(getattr(p, value) for p in alike),
                              "n": len(alike),
                              "low": min(repeats) if len(repeats) > 1 else None,
                              "high": max(repeats) if len(repeats) > 1 else None}
    return out


def matching(reference, case, label):
    """The published row with that label, or without one, and with those values."""
    for row in (reference or {}).get("rows", []):
        if row.get("label") is not None and label is not None:
            fits = row["label"] == label
        else:
            fits = bool(row["case"])
        if fits and all(str(case.get(k)) == str(v) for k, v in row["case"].items()):
            return row
    return {}


def checkpoints(study, points):
    """{(device, all axes but recomputation, strategy): figures}."""
    out = {}
    for p in points:
        alike = [q for q in points if q.device == p.device and q.system == p.system
                 and q.without("recompute", "memory") == p.without("recompute", "memory")]
        if len(alike) < 2:
            continue
        base = next((q for q in alike if q.way() == "none"), None)
        published = matching(study.get("reference"), p.case, p.label)

        def share(a, b):
            return None if a is None or not b else a / b

        out[p.device, p.case["model"], p.size(), p.way()] = {
            "kept": p.kept, "kept_ratio": share(p.kept, base and base.kept),
            "kept_published": published.get("kept_ratio"), "peak": p.peak,
            "peak_ratio": share(p.peak, base and base.peak),
            "peak_published": published.get("peak_ratio"), "step_ms": p.step_ms,
            "time_ratio": share(base and base.speed, p.speed),
            "time_published": published.get("time_ratio"), "dataset": p.dataset,
            "step_low": min(p.repeats["step_ms"]) if len(p.repeats["step_ms"]) > 1 else None,
            "step_high": max(p.repeats["step_ms"]) if len(p.repeats["step_ms"]) > 1 else None,
            "time_noise": verdict.within_noise(base, p, "speed")
            if base not in (None, p) else None,
            "time_low": base.speed / max(p.repeats["speed"])
            if base and len(p.repeats["speed"]) > 1 else None,
            "time_high": base.speed / min(p.repeats["speed"])
            if base and len(p.repeats["speed"]) > 1 else None}
    return out


def ranks(points):
    """{(device, model, ranks, level, budget): figures}."""
    out = {}
    for p in points:
        runs = p.runs
        told = [r["figures"].get("predicted") or r.get("predicted") or {} for r in runs]

        def share(a, b):
            return None if a is None or not b else a / b

        peak, step = (middle([t.get(k) for t in told]) for k in ("peak_bytes", "step_ms"))
        memory = max(runs, key=lambda r: r["figures"]["peak_bytes"])["figures"].get("memory") or {}
        out[p.device, p.case["model"], p.case.get("ranks", 1), p.case.get("shard", "none"),
            p.case.get("memory")] = {
            **{k: memory.get(k) for k in ("parameters", "gradients", "optimizer")},
            "peak": p.peak, "peak_predicted": peak, "peak_ratio": share(peak, p.peak),
            "step_ms": p.step_ms, "step_predicted": step, "step_ratio": share(step, p.step_ms),
            "exchanged": middle([
                (f["reduce_bytes"] + f.get("gather_bytes", 0)) / f["steps"]
                if "reduce_bytes" in f else None for f in (r["figures"] for r in runs)])}
    return out


def steps(study, points, runs):
    """{(device, model, source, label): figures}; ratios to the first label."""
    out, labels = {}, {}
    reference = study.get("reference") or {}
    for p in points:
        out[p.device, p.case["model"], p.system, p.label] = {
            "time_s": p.time_s if p.epoch_s is None else p.epoch_s,
            "samples_per_s": p.speed, "peak": p.peak, "low": None, "high": None}
        times = p.repeats["time_s" if p.epoch_s is None else "epoch_s"]
        if len(times) > 1:
            out[p.device, p.case["model"], p.system, p.label] |= {
                "low": min(times), "high": max(times)}
    for run in runs:
        case = settings(run)
        place = (run["device"]["name"], case["model"])
        labels.setdefault(place, []).append(run["label"])
        row = matching(reference, case, run["label"])
        if row:
            out[(*place, "published", run["label"])] = {
                "time_s": row.get("time_s"), "peak": row.get("peak_bytes"),
                "samples_per_s": row.get("samples_per_s")}
    named = [row.get("label") for row in reference.get("rows", [])]
    for (device, model, source, _), row in out.items():
        mine = labels[device, model]
        first = next((name for name in named if name in mine), mine[0])
        base = out.get((device, model, source, first), {})
        for ratio, value in (("time_ratio", "time_s"), ("peak_ratio", "peak")):
            known = row[value] is not None and base.get(value)
            row[ratio] = row[value] / base[value] if known else None
        row["time_noise"] = None
        if row is not base and row.get("low") and base.get("low"):
            row["time_noise"] = (row["low"] <= base["high"] and base["low"] <= row["high"])
    return out


def expected(paths):
    studies, runs = load(paths)
    points = points_of(runs)
    out = {"counts": {s: sum(r["status"] == s for r in runs)
                      for s in ("done", "oom", "failed", "skipped")},
           "points": len(points), "verdicts": verdict.verdicts(studies, points),
           "warned": sum(bool((r["figures"] or {}).get("warnings")) for r in runs),
           "summaries": {}, "grid": {}, "checkpoints": {}, "ranks": {},
           "steps": {}, "frontier": {}}
    for name, study in studies.items():
        own = [p for p in points if p.study == name]
        groups = {}
        for p in own:
            if p.system == "reprise":
                groups.setdefault((name, p.device, p.case["model"]), []).append(p)
        for key, here in groups.items():
            pairs = pairs_of(here)
            ways = {b.way() for _, b in pairs}
            sizes = {b.size() for _, b in pairs}
            out["summaries"][key] = {
                "points": len(here),
                "strategies": {w: pair_figures([p for p in pairs if p[1].way() == w])
                               for w in ways},
                "sizes": {} if len(sizes) < 2 else {
                    (s, w): pair_figures(chosen) for s in sizes for w in ways
                    if (chosen := [p for p in pairs if p[1].way() == w
                                   and p[1].size() == s])},
                "levers": levers(here),
                "best": budgets(here, study["views"])}
        if "grid" in study["views"]:
            out["grid"][name] = grid(own)
        if "checkpoints" in study["views"]:
            out["checkpoints"][name] = checkpoints(study, own)
        if "ranks" in study["views"]:
            out["ranks"][name] = ranks(own)
        if "steps" in study["views"]:
            out["steps"][name] = steps(study, own, [
                r for r in runs if r["study"] == name])
        for key in {(p.device, p.case["model"], p.size()) for p in own}:
            for found in front([p for p in own if key == (
                    p.device, p.case["model"], p.size())]):
                out["frontier"].setdefault(name, set()).add((*key, *found))
    return out


# The number formats of the page, in decimal arithmetic.

def fixed(value, digits):
    """JavaScript's toFixed(): rounds ties up."""
    exact = decimal.Decimal(value)
    return str(exact.quantize(decimal.Decimal(1).scaleb(-digits),
                              decimal.ROUND_HALF_UP))


def three(value):
    size = abs(value)
    text = fixed(size, 2 if size < 9.995 else 1 if size < 99.95 else 0)
    return ("\u2212" if value < 0 and float(text) else "") + text


def written(value, form):
    space = "\u00a0"
    if form == "count":
        return str(value)
    if form == "number":
        return three(value)
    if form == "share":
        return fixed(value, 3)
    if form == "bytes":
        value, unit = value / 1024, 0
        while abs(value) >= 999.5 and unit < 3:
            value, unit = value / 1024, unit + 1
        return three(value) + space + ("KiB", "MiB", "GiB", "TiB")[unit]
    if form in ("seconds", "ms"):
        seconds = value / 1000 if form == "ms" else value
        if seconds < 0.9995:
            return three(1000 * seconds) + space + "ms"
        return three(seconds) + space + "s"
    if form in ("lower", "more"):
        amount = written(abs(value), "percent")
        up, down = {"lower": ("lower", "higher"), "more": ("more", "less")}[form]
        if amount.startswith("0.0"):
            return "unchanged"
        return f"{amount} {up if value > 0 else down}"
    if form == "fall":
        return written(-value, "change")
    assert form in ("percent", "change"), form
    size = abs(100 * value)
    text = fixed(size, 1 if size < 9.95 or 99 <= size < 100 else 0)
    sign = "\u2212" if value < 0 else "+" if form == "change" else ""
    return (sign if float(text) else "") + text + space + "%"
