"""Checks of the content and layout of a page. Each check yields descriptions of problems."""
import csv
import io
import time

import recompute

FIRST_SCREEN = """(() => {
  const low = (node) => node ? node.getBoundingClientRect().bottom : null;
  scrollTo(0, 0);
  return [low(document.querySelector('.headline')),
    low(document.querySelector('#verdict figure .drawing svg')), innerHeight]; })()"""

AXES = """[...document.querySelectorAll('figure.plot')].flatMap(f =>
  [...f.querySelectorAll('.role-axis')].map(axis => [f.dataset.plot,
    [...axis.querySelectorAll('.role-axis-title text')].map(t => t.textContent).join(),
    [...axis.querySelectorAll('.role-axis-label text')].map(t => t.textContent)]))"""

TABLES = """[...document.querySelectorAll('.scroll')]
  .filter(s => s.clientWidth > 0 && s.scrollWidth > s.clientWidth + 1)
  .map(s => `${s.closest('section').id}: ${s.scrollWidth} in ${s.clientWidth} px`)"""

# Pairs of texts in one plot that overlap by more than their margins.
COVERED = """(() => {
  const figure = document.querySelector('#verdict figure.plot');
  const texts = [...figure.querySelectorAll('.mark-text.role-mark text')]
    .filter(t => t.textContent).map(t => [t.textContent, t.getBoundingClientRect()]);
  return texts.flatMap(([a, x], i) => texts.slice(i + 1).filter(([, y]) =>
    x.left + 2 < y.right && y.left + 2 < x.right && x.top + 3 < y.bottom && y.top + 3 < x.bottom)
    .map(([b]) => `${a} | ${b}`)); })()"""


def first_screen(browser):
    headline, chart, height = browser.evaluate(FIRST_SCREEN)
    deadline = time.monotonic() + 10
    while chart is None and time.monotonic() < deadline:  # drawn when it comes into view
        browser.settle()
        headline, chart, height = browser.evaluate(FIRST_SCREEN)
    if headline is None or headline > height:
        yield f"the verdict ends at {headline} of {height} px"
    if chart is None or chart > height:
        yield f"the chart ends at {chart} of {height} px"
    for pair in browser.evaluate(COVERED):
        yield f"labels cover each other: {pair}"


def headline(found):
    """The sentence of a verdict, computed from its figures."""
    both = found["base"], found["pick"]

    def setting(side):
        words = f"{side['batch']} without recomputation"
        if side["memory"] is not None:
            words = f"a plan for {side['memory']} ({side['batch']})"
        elif side["recompute"] != "none":
            words = f"{side['batch']} with recomputation ({side['recompute']})"
        extra = [side[name] for name in ("optimizer", "precision")
                 if both[0][name] != both[1][name] and side[name] is not None]
        return ", ".join([words, *extra])

    def change(key, form, noun):
        if found[f"{key}_noise"]:
            return f"no measurable difference in {noun}"
        return f"{recompute.written(found[key], form)} {noun}"

    size = f" at {found['size']}" if found["size"] else ""
    if found["keep"]:
        return f"Keep {setting(both[0])}{size}: no other setting gives a better trade-off"
    return (f"Use {setting(both[1])}: {change('peak', 'lower', 'peak')}, "
            f"{change('time', 'more', 'time')}{size}")


def headlines(browser, computed, verdicts):
    shown = browser.evaluate("[...document.querySelectorAll('.headline')].map(n => n.textContent)")
    wanted = [headline(verdicts[v["study"], v["device"], v["model"]][0])
              for v in computed["verdicts"]]
    for found, want in zip(shown + [None] * len(wanted), wanted):
        if found != want:
            yield f"headline: expected {want!r}, got {found!r}"


def axes(browser):
    """Time axes start at zero, no legend is cut off, and all plots are drawn."""
    found = 0
    for name, title, labels in browser.evaluate(AXES):
        if title.startswith("time") or title == "× none":
            found += 1
            if not any(label in ("0", "0.0") for label in labels):
                yield f"{name}: the axis '{title}' does not start at zero: {labels}"
    if not found:
        yield "no plot has an axis of time"
    cut = browser.evaluate("[...document.querySelectorAll('.role-legend text')]"
                           ".map(t => t.textContent).filter(t => t.includes('…'))")
    for text in cut:
        yield f"a legend is cut off: {text}"


def tables(browser):
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    for text in browser.evaluate(TABLES):
        yield f"a table is cut off: {text}"


def outcomes(browser, wanted):
    """Every outcome has a table with all of its runs."""
    shown = dict(browser.evaluate(
        "[...document.querySelectorAll('table.outcome')].map(t => "
        "[t.dataset.status, t.querySelectorAll('tbody tr').length])"))
    counts = {k: v for k, v in wanted["counts"].items() if k != "done"}
    for status, n in (counts | {"warned": wanted["warned"]}).items():
        if shown.get(status, 0) != n:
            yield f"{n} runs are {status}, {shown.get(status, 0)} are shown as such"


def provenance(browser, studies, runs):
    """Every study has a unique title and shows its devices, versions and dates."""
    titles = browser.evaluate("[...document.querySelectorAll('section[id^=study-] h2')]"
                              ".map(n => n.textContent)")
    if len(set(titles)) != len(studies):
        yield f"{len(studies)} studies have the titles {titles}"
    lines = browser.evaluate("[...document.querySelectorAll('.provenance')].map(n => n.textContent)")
    for key in studies:
        own = [r for r in runs if r["study"] == key]
        wanted = {r["device"]["name"] for r in own} | {r["source"] for r in own}
        wanted |= {f"LibTorch {r['versions']['libtorch']}" for r in own}
        wanted |= {f"Reprise {r['versions']['reprise']}" for r in own
                   if "reprise" in r["versions"]}
        if not any(all(w in line for w in wanted) and "run " in line for line in lines):
            yield f"{key}: no line has all of {sorted(wanted)}"
    if "Page created on" not in browser.evaluate("document.querySelector('.about').textContent"):
        yield "the page does not say when it was created"


def saved_rows(text):
    return list(csv.DictReader(io.StringIO(text, newline="")))


def exports(saved, verdicts):
    """The CSV of every plot is a table; that of the trade-off has the verdict's figures."""
    for plot in saved:
        lines = list(csv.reader(io.StringIO(plot["csv"], newline="")))
        if len(lines) < 2 or any(len(line) != len(lines[0]) for line in lines):
            yield f"{plot['name']}: the CSV is not a table"
    trades = [saved_rows(p["csv"]) for p in saved if "trade-off" in p["name"]]
    if len(trades) != len(verdicts):
        yield f"{len(verdicts)} verdicts have {len(trades)} tables"
    shown = {tuple(sorted(float(row["peak_bytes"]) for row in rows if row["role"]))
             for rows in trades}
    for found in (v[0] for v in verdicts.values()):
        peaks = {found["base"]["peak"], found["pick"]["peak"]}
        if tuple(sorted(map(float, peaks))) not in shown:
            yield f"no table has the peaks {peaks}"
