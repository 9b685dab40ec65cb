"""Independent computation of the setting that a page recommends.

Follows docs/report.md and shares no code with the page.
"""
CHOICES = ("recompute", "memory", "batch", "accumulate", "global_batch", "steps",
           "epochs", "seconds")
TECHNIQUES = ("optimizer", "precision")


def within_noise(a, b, name):
    """Whether the repeats of two points overlap; None if neither was repeated."""
    first, second = a.repeats[name], b.repeats[name]
    if not first or not second or max(len(first), len(second)) < 2:
        return None
    return min(first) <= max(second) and min(second) <= max(first)


def works(study, points):
    """Groups points that do the same work, as defined by the views of the study."""
    free = CHOICES + (TECHNIQUES if "steps" in study["views"] else ())
    groups = {}
    for p in points:
        if "batch" in p.case and p.way() and p.peak and p.speed:
            groups.setdefault((p.without(*free), p.global_batch), []).append(p)
    return groups.values()


def judge(group):
    """The statements of the page on one work, or None."""
    fit = [p for p in group if not p.warnings]
    plain = [p for p in fit if p.way() == "none" and "memory" not in p.case]
    if not plain or len(fit) < 2:
        return None
    base = max(plain, key=lambda p: p.case["batch"])

    def product(p):
        return p.peak * base.speed / (base.peak * p.speed)

    pick = base
    for p in fit:
        saves = p.peak < base.peak and not within_noise(base, p, "peak")
        hastens = p.speed > base.speed and not within_noise(base, p, "speed")
        if base.speed <= 1.5 * p.speed and product(p) <= 0.95 and (saves or hastens) \
                and product(p) < product(pick):
            pick = p
    moved = pick is not base
    return {
        "size": base.size(), "optimizer": base.case.get("optimizer"),
        "precision": base.case.get("precision"), "ranks": base.case["ranks"],
        "global_batch": base.global_batch, "settings": len(fit),
        "warned": len(group) - len(fit),
        "repeats": max(len(p.repeats["speed"]) for p in group), "keep": not moved,
        "base": side(base), "pick": side(pick),
        "peak": 1 - pick.peak / base.peak, "time": base.speed / pick.speed - 1,
        "peak_noise": within_noise(base, pick, "peak") if moved else None,
        "time_noise": within_noise(base, pick, "speed") if moved else None}


def side(p):
    return {"batch": p.batches(), "recompute": p.way(), "memory": p.case.get("memory"),
            "optimizer": p.case.get("optimizer"), "precision": p.case.get("precision"),
            "peak": p.peak, "ms": 1000 / p.speed, "dataset": p.dataset}


def verdicts(studies, points):
    """{(study, device, model): statements, in the order of the page}."""
    groups = {}
    for p in points:
        if p.system == "reprise":
            groups.setdefault((p.study, p.device, p.case["model"]), []).append(p)
    out = {}
    for key, own in groups.items():
        found = [v for v in map(judge, works(studies[key[0]], own)) if v]
        found.sort(key=lambda v: (-v["settings"], -v["base"]["peak"]))
        if found:
            out[key] = found
    return out
