#!/usr/bin/env python3
"""Tests the page of a report in headless Chromium.

    page_test.py --reprise COMMAND           creates results and a page, and tests it
    page_test.py --page FILE RESULTS...      tests an existing page
    --shots DIR                              also saves screenshots

Every plot has marks; filters, scales and the theme change what is drawn; a run's
series opens; figures equal those of recompute.py; the first screen shows the verdict and
its chart; there are no network requests and no console messages; nothing is wider than
a phone.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import chromium
import page_layout
import recompute

HERE = pathlib.Path(__file__).resolve().parent
MOST_BYTES = 4_000_000
SKIPPED = 77  # CTest's SKIP_RETURN_CODE
failures = []


def check(condition, text):
    if not condition:
        failures.append(text)
        print(f"FAILED: {text}", file=sys.stderr)


def check_all(found, where):
    """Reports the problems in `found`."""
    for text in found:
        check(False, f"{where}: {text}")


def close(a, b):
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return abs(a - b) <= 1e-9 * max(abs(a), abs(b), 1e-3)
    return a == b


def same(found, wanted, where):
    """Checks that `found` contains everything in `wanted`."""
    if isinstance(wanted, dict):
        check(isinstance(found, dict), f"{where}: expected figures, got {found}")
        for key, value in wanted.items():
            if isinstance(found, dict):
                same(found.get(key), value, f"{where}.{key}")
    else:
        check(close(found, wanted), f"{where}: expected {wanted}, got {found}")


def same_keys(found, wanted, where):
    check(found.keys() == set(wanted), f"{where}: expected {sorted(map(str, wanted))}, "
          f"got {sorted(map(str, found))}")


def compare_computed(page, wanted):
    """Compares the figures of the page with independently computed ones."""
    same(page["counts"], wanted["counts"], "counts")
    check(page["points"] == wanted["points"], "how many points")
    check(page["warned"] == wanted["warned"], "how many runs have warnings")
    verdicts = {(v["study"], v["device"], v["model"]): v["cases"] for v in page["verdicts"]}
    same_keys(verdicts, wanted["verdicts"], "verdicts")
    for key, want in wanted["verdicts"].items():
        check(len(verdicts[key]) == len(want), f"{key}: {len(verdicts[key])} cases")
        for i, (found, case) in enumerate(zip(verdicts[key], want)):
            same(found, case, f"verdict {key} {i}")
    summaries = {(s["study"], s["device"], s["model"]): s for s in page["summaries"]}
    same_keys(summaries, wanted["summaries"], "summaries")
    for key, want in wanted["summaries"].items():
        found, where = summaries[key], " ".join(key)
        check(found["points"] == want["points"], f"{where}: points")
        for name, by in (("strategies", lambda r: r["recompute"]),
                         ("sizes", lambda r: (r["size"], r["recompute"])),
                         ("levers", lambda r: r["lever"])):
            rows = {by(row): row for row in found[name]}
            same_keys(rows, want[name], f"{where} {name}")
            for row, figures in want[name].items():
                same(rows[row], figures, f"{where} {name} {row}")
        budgets, table = want["best"]
        check(found["best"]["budgets"] == budgets, f"{where}: budgets")
        rows = [[cell and [cell["samples_per_s"], cell["peak"]]
                 for cell in row["cells"]] for row in found["best"]["rows"]]
        check(len(rows) == len(table) and all(row in table for row in rows),
              f"{where}: best settings: expected {table}, got {rows}")
    for study in page["grid"]:
        for what, want in wanted["grid"][study["study"]].items():
            rows = {}
            for row in study[what]:
                figures = {k: row.pop(k, None) for k in ("value", "n", "low", "high")}
                size = row.pop("size")
                axes = list(row.values())
                rows[(*axes[:4], size, *axes[4:])] = figures
            same_keys(rows, want, f"{study['study']} {what}")
            for key, figures in want.items():
                same(rows[key], figures, f"{study['study']} {what} {key}")
    for study in page["checkpoints"]:
        rows = {(t["axes"]["device"], t["axes"]["model"], size_of(t["axes"]),
                 row["recompute"]): row for t in study["tables"] for row in t["rows"]}
        want = wanted["checkpoints"][study["study"]]
        same_keys(rows, want, "checkpoints")
        for key, figures in want.items():
            same(rows[key], figures, f"checkpoints {key}")
    for study in page["ranks"]:
        rows = {(t["axes"]["device"], t["axes"]["model"], row["ranks"], row["shard"],
                 row["memory"]): row for t in study["tables"] for row in t["rows"]}
        want = wanted["ranks"][study["study"]]
        check(len(want) > 0, "rows of ranks")
        same_keys(rows, want, "ranks")
        for key, figures in want.items():
            same(rows[key], figures, f"ranks {key}")
    for study in page["steps"]:
        rows = {(t["device"], t["model"], source["name"], label): row
                for t in study["tables"] for source in t["sources"]
                for label, row in zip(t["labels"], source["rows"])
                if row and "status" not in row}
        want = wanted["steps"][study["study"]]
        same_keys(rows, want, "steps")
        for key, figures in want.items():
            same(rows[key], figures, f"steps {key}")
    for study in page["frontier"]:
        rows = {tuple(p[k] for k in ("device", "model", "size", "peak",
                                     "samples_per_s")) for p in study["front"]}
        check(rows == wanted["frontier"].get(study["study"], set()),
              f"frontier of {study['study']}")


def size_of(axes):
    return ", ".join(text.format(axes[name])
                     for name, text in recompute.SIZES.items() if name in axes)


def compare_written(browser, computed):
    """Every figure in texts and tables equals the computed one, to the last digit."""
    shown = browser.evaluate(
        "[...document.querySelectorAll('[data-figure]')].map(n => "
        "[n.dataset.figure, n.dataset.format, n.textContent])")
    check(len(shown) > 50, f"only {len(shown)} figures are written")
    for path, form, text in shown:
        value = computed
        for key in path.split("."):
            value = value[int(key)] if isinstance(value, list) else value[key]
        want = recompute.written(value, form)
        check(text == want, f"{path}: expected {want}, got {text}")
    return len(shown)


MARKS = """[...document.querySelectorAll('figure.plot')].map(f => ({
  name: f.dataset.plot,
  marks: [...f.querySelectorAll('.mark-symbol.role-mark path, .mark-line.role-mark path, '
    + '.mark-rect.role-mark path, .mark-area.role-mark path, .mark-group .mark-symbol path')]
    .filter(p => (p.getAttribute('d') || '').length > 4).length,
  wide: f.scrollWidth > f.clientWidth + 1,
  text: f.querySelector('.drawing').textContent }))"""

CLICK = "document.querySelector({!r}).click()"


def draw_all(browser):
    browser.evaluate("reprise.drawAll()")
    browser.settle()
    return browser.evaluate(MARKS)


def check_plots(browser, where):
    plots = draw_all(browser)
    check(len(plots) > 0, f"{where}: no plots")
    names = [plot["name"] for plot in plots]
    check(len(set(names)) == len(names), f"{where}: plots share a name")
    for plot in plots:
        check(plot["marks"] > 0, f"{where}: {plot['name']} has no marks")
        check(not plot["wide"], f"{where}: {plot['name']} is too wide")
        for bad in ("NaN", "undefined", "null", "Infinity"):
            check(bad not in plot["text"], f"{where}: {bad} in {plot['name']}")
    text = browser.evaluate("document.getElementById('page').innerText")
    for bad in ("NaN", "undefined", "Infinity", "[object"):
        check(bad not in text, f"{where}: the text has {bad}")
    return plots


def check_quiet(browser, url, where):
    for complaint in browser.complaints():
        check(False, f"{where}: {complaint}")
    for request in browser.requests():
        check(request.split("#")[0] == url or request.startswith(("data:", "blob:")),
              f"{where}: a request leaves the page: {request[:100]}")


def check_filters(browser):
    """Selecting a value never shows more runs, and resetting shows all again."""
    counted = "document.querySelectorAll('#runs tbody tr').length"
    whole, drawn = browser.evaluate(counted), draw_all(browser)
    chips = browser.evaluate("[...document.querySelectorAll('.chip')].map(c => "
                             "[c.dataset.axis, c.dataset.value])")
    check(len(chips) > 1, "there is nothing to filter by")
    first = {}
    for axis, value in chips:
        first.setdefault(axis, value)
    changed = 0
    drawing = list(first)[:5]  # drawing is slow; the other axes behave alike
    for axis, value in first.items():
        browser.evaluate(CLICK.format(f'.chip[data-axis="{axis}"][data-value="{value}"]'))
        left = browser.evaluate(counted)
        check(0 < left < whole, f"filter {axis}={value}: {left} of {whole} runs")
        if axis in drawing:
            now = {p["name"]: p["marks"] for p in draw_all(browser)}
            changed += now != {p["name"]: p["marks"] for p in drawn}
            for name, marks in now.items():
                check(marks > 0, f"filter {axis}={value}: {name} has no marks")
        browser.evaluate(CLICK.format("#reset-filters"))
    check(changed == len(drawing), f"{len(drawing) - changed} filters change no plot")
    check(browser.evaluate(counted) == whole, "not all runs come back")
    browser.evaluate(CLICK.format("#log-scale"))
    check_plots(browser, "linear scales")
    browser.evaluate(CLICK.format("#log-scale"))
    for kind in browser.evaluate("[...(document.querySelector('select.memory-kind') || [])]"
                                 ".map(o => o.value)"):
        browser.evaluate(
            "(s => { s.value = %r; s.dispatchEvent(new Event('change')); })"
            "(document.querySelector('select.memory-kind'))" % kind)
        check_plots(browser, f"memory shown: {kind}")


def check_sorting(browser):
    cells = "[...document.querySelectorAll('#runs tbody tr')].map(r => r.dataset.id).join()"
    before = browser.evaluate(cells)
    heading = ("[...document.querySelectorAll('#runs thead button')]"
               ".find(b => b.textContent.startsWith('peak')).click()")
    browser.evaluate(heading)
    up = browser.evaluate(cells)
    browser.evaluate(heading)
    check(before != up != browser.evaluate(cells), "a heading does not sort")


def check_run(browser, shots):
    """A run opens with its series and its command, and closes again."""
    browser.evaluate("[...document.querySelectorAll('#runs button.open')]"
                     ".find(b => b.textContent === 'series').click()")
    browser.settle()
    check(browser.evaluate("document.getElementById('run').open"), "no run opens")
    marks = browser.evaluate("document.querySelectorAll("
                             "'#run .mark-area.role-mark path').length")
    check(marks >= 2, "a run's series is not drawn")
    check(browser.evaluate("document.querySelector('#run code').textContent")
          .startswith("reprise "), "a run has no command")
    if shots:
        browser.screenshot(shots / "run.png")
    browser.evaluate("document.getElementById('run').close()")


def check_tip(browser):
    """Hovering over a mark shows a tooltip."""
    place = browser.evaluate("""(() => {
      const mark = document.querySelector('figure.plot .mark-symbol.role-mark path');
      mark.scrollIntoView({block: 'center'});
      const box = mark.getBoundingClientRect();
      return [box.x + box.width / 2, box.y + box.height / 2]; })()""")
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
    browser.settle()
    check(browser.evaluate("document.getElementById('tip').hidden === false && "
                           "document.getElementById('tip').textContent.length > 5"),
          "no tooltip at a mark")


def check_zoom(browser):
    """Ctrl and the wheel zoom the axis; a double-click resets it."""
    find = ("[...document.querySelectorAll('figure.plot')]"
            ".find(f => f.dataset.plot.includes('frontier'))")
    # Labels that disappear and reappear have another order.
    ticks = (f"[...{find}.querySelectorAll('.role-axis-label text')]"
             ".map(t => t.textContent).sort().join()")
    x, y = browser.evaluate(f"""(() => {{ const f = {find};
      f.scrollIntoView({{block: 'center'}});
      const box = f.querySelector('svg').getBoundingClientRect();
      return [box.x + box.width / 2, box.y + box.height / 2]; }})()""")
    before = browser.evaluate(ticks)
    wheel = dict(type="mouseWheel", x=x, y=y, deltaX=0, deltaY=-400)
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    browser.send("Input.dispatchMouseEvent", modifiers=2, **wheel)
    browser.settle()
    check(browser.evaluate(ticks) != before, "the wheel does not zoom")
    for count in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            browser.send("Input.dispatchMouseEvent", type=kind, x=x, y=y,
                         button="left", clickCount=count)
    browser.settle()
    check(browser.evaluate(ticks) == before, "a double click does not go back")
    browser.evaluate("document.getElementById('run').close()")


def check_saved(browser, verdicts):
    """Every plot can be exported as an image with its title, and as a table."""
    saved = browser.evaluate("reprise.savedPlots()")
    check(len(saved) == browser.evaluate("document.querySelectorAll('figure.plot').length"),
          "not every plot can be saved")
    for plot in saved:
        check(plot["svg"].startswith("<svg") and len(plot["png"]) > 2000,
              f"{plot['name']} is not saved")
    check_all(page_layout.exports(saved, verdicts), "CSV")


def check_print(browser):
    """Plots that were never in view are printed too."""
    answer = browser.send("Page.printToPDF", preferCSSPageSize=True)
    check(len(answer["data"]) > 100_000, "the printout is too small to have its plots")


def check_explained(browser):
    """A utilisation plot explains what it shows."""
    notes = browser.evaluate(
        "[...document.querySelectorAll('figure[data-plot*=utilisation]')]"
        ".map(f => (f.querySelector('.note') || {textContent: ''}).textContent)")
    check(all("fraction of" in note for note in notes), f"utilisation is not explained: {notes}")


def check_phone(browser, where):
    wide = browser.evaluate("document.documentElement.scrollWidth")
    check(wide <= 390, f"{where}: {wide} px wide on a phone")


def take_shots(browser, shots, name):
    """Screenshots of the page, section by section."""
    if not shots:
        return
    width, height = browser.evaluate("[innerWidth, document.documentElement.scrollHeight]")
    browser.evaluate("scrollTo(0, 0)")
    for i in range(0, min(height, 40_000), 2000):
        browser.screenshot(shots / f"{name}-{i // 2000:02d}.png",
                           clip=(0, i, width, min(2000, height - i)))


def test_page(path, results, shots):
    size = path.stat().st_size
    check(size < MOST_BYTES, f"the page has {size} bytes")
    html = path.read_text()
    check("default-src 'none'" in html.split("</head>")[0],
          "no Content-Security-Policy that forbids requests")
    wanted = recompute.expected(results)
    studies, runs = recompute.load(results)
    url = path.resolve().as_uri()
    with chromium.Browser(chromium.find()) as browser:
        began = time.monotonic()
        browser.open(url, 1280, 800)
        loaded = time.monotonic() - began
        check_all(page_layout.first_screen(browser), "desktop")
        computed = json.loads(browser.evaluate(
            "document.getElementById('computed').textContent"))
        compare_computed(computed, wanted)
        written = compare_written(browser, computed)
        plots = check_plots(browser, "desktop")
        check_all(page_layout.headlines(browser, computed, wanted["verdicts"]), "verdict")
        check_all(page_layout.axes(browser), "desktop")
        check_all(page_layout.outcomes(browser, wanted), "desktop")
        check_all(page_layout.provenance(browser, studies, runs), "desktop")
        check_explained(browser)
        take_shots(browser, shots, "desktop")
        check_sorting(browser)
        check_run(browser, shots)
        check_tip(browser)
        check_zoom(browser)
        check_filters(browser)
        check_saved(browser, wanted["verdicts"])
        check_all(page_layout.tables(browser), "desktop")
        check_quiet(browser, url, "desktop")
        browser.open(url, 1280, 800, dark=True)
        check_all(page_layout.first_screen(browser), "dark")
        check(browser.evaluate("document.documentElement.dataset.theme") == "dark",
              "a dark system has a light page")
        check_plots(browser, "dark")
        take_shots(browser, shots, "dark")
        browser.evaluate(CLICK.format("#theme"))
        check(browser.evaluate("document.documentElement.dataset.theme") == "light",
              "the switch does not switch")
        check_quiet(browser, url, "dark")
        for dark in (False, True):
            where = "phone, dark" if dark else "phone"
            browser.open(url, 390, 844, dark=dark, phone=True)
            check_all(page_layout.first_screen(browser), where)
            check_plots(browser, where)
            check_phone(browser, where)
            browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
            check_phone(browser, where + ", all open")
            take_shots(browser, shots, where.replace(", ", "-"))
            check_quiet(browser, url, where)
        browser.open(url, 1280)
        check_print(browser)
        check_quiet(browser, url, "print")
    print(f"{path.name}: {size} bytes, loaded in {loaded:.2f} s, {len(plots)} plots, "
          f"{written} figures, {len(failures)} failures")


def test_odd(reprise, work):
    """Incomplete results, and results with missing values."""
    study = {"type": "study", "study": "odd", "title": "Odd </script>", "views":
             ["grid", "steps", "checkpoints", "frontier"], "runs": 3,
             "reference": None, "question": None}
    failed = {"type": "run", "id": "1", "study": "odd", "system": "reprise",
              "case": {"model": "mlp"}, "label": None, "repeat": 1,
              "status": "failed", "reason": "no <b>reason</b>", "predicted": None,
              "figures": None, "observed": None, "series": None,
              "device": {"name": "cpu", "kind": "cpu"}, "command": "reprise train"}
    bare = failed | {"id": "2", "status": "done", "reason": None, "figures": {
        "model": "mlp", "samples_per_s": 12.5, "peak_bytes": 4096}}
    other = bare | {"id": "3", "study": "unknown", "series": {"t_s": []},
                    "case": {"model": "mlp", "batch": 4, "recompute": "sqrt"}}
    page = work / "odd.html"
    for name, records in (("begun", [study]), ("failed", [study, failed]),
                          ("bare", [study, failed, bare]),
                          ("other", [study, bare, other])):
        file = work / f"{name}.jsonl"
        file.write_text("".join(json.dumps(r) + "\n" for r in records))
        subprocess.run([reprise, "report", file, "-o", page], check=True)
        with chromium.Browser(chromium.find()) as browser:
            browser.open(page.as_uri(), 390, phone=True)
            browser.evaluate("reprise.drawAll()")
            browser.evaluate("document.querySelectorAll('#runs button.open')"
                             ".forEach(b => { b.click(); "
                             "document.getElementById('run').close(); })")
            text = browser.evaluate("document.getElementById('page').innerText")
            check("Odd </script>" in text, f"{name}: the study is not named")
            for bad in ("NaN", "undefined", "Infinity", "[object", "null"):
                check(bad not in text, f"{name}: the text has {bad}")
            check_phone(browser, name)
            check_quiet(browser, page.as_uri(), name)


def test_parts(reprise, work, study):
    """A study split over two directories gives the same page as one directory."""
    lines = (study / "results.jsonl").read_text().splitlines(keepends=True)
    runs = [line for line in lines if json.loads(line)["type"] == "run"]
    others = [line for line in lines if line not in runs]
    parts = []
    for i in range(2):
        parts.append(work / f"part-{i}")
        parts[i].mkdir()
        (parts[i] / "results.jsonl").write_text("".join(others + runs[i::2]))
    page = work / "parts.html"
    subprocess.run([reprise, "report", *parts, "-o", page], check=True)
    with chromium.Browser(chromium.find()) as browser:
        browser.open(page.as_uri(), 1280)
        compare_computed(json.loads(browser.evaluate(
            "document.getElementById('computed').textContent")), recompute.expected([study]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--reprise")
    parser.add_argument("--page", type=pathlib.Path)
    parser.add_argument("--shots", type=pathlib.Path)
    parser.add_argument("results", nargs="*", type=pathlib.Path)
    args = parser.parse_args()
    if not chromium.find():
        print("Chromium is missing; on Debian: apt-get install chromium", file=sys.stderr)
        # Skipped only if REPRISE_SETUP=off; otherwise a missing browser is a failure.
        return SKIPPED if os.environ.get("REPRISE_SETUP") == "off" else 1
    if args.shots:
        args.shots.mkdir(parents=True, exist_ok=True)
    if args.page:
        test_page(args.page, args.results, args.shots)
        return 1 if failures else 0
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        subprocess.run([sys.executable, HERE / "make_results.py", work], check=True)
        studies = [work / name for name in ("mnist-gpu", "mnist-cpu", "checkpoints",
                                            "steps", "frontier", "deep", "checkpoints-again")]
        # One page with all studies, and one with a single study.
        for name, results in (("all.html", studies), ("one.html", studies[:1])):
            subprocess.run([args.reprise, "report", *results, "-o", work / name],
                           check=True)
            test_page(work / name, results, args.shots)
            if args.shots:
                break
        test_odd(args.reprise, work)
        test_parts(args.reprise, work, studies[3])
        if not failures:
            test_plots(args.reprise, work, studies[2])
    return 1 if failures else 0


def test_plots(reprise, work, study):
    """--plots saves images and tables."""
    subprocess.run([reprise, "report", study, "--plots", work / "plots"], check=True)
    saved = sorted((work / "plots").iterdir())
    check(len(saved) >= 9, f"only {len(saved)} files are saved")
    begins = {".svg": b"<svg", ".png": b"\x89PNG", ".csv": b"study,device,"}
    for file in saved:
        check(file.read_bytes().startswith(begins[file.suffix]),
              f"{file.name} has other contents than its name says")


if __name__ == "__main__":
    sys.exit(main())
