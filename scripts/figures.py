#!/usr/bin/env python3
"""Generates the tables of README.md and docs from docs/results, and checks them.

    scripts/figures.py            rewrites the tables between the markers, and the pictures of
                                  draw_steps.py and plot_frontier.py --budgets
    scripts/figures.py --check    changes nothing; exits with status 1 if a table differs from
                                  the results, if two results contradict each other, if the
                                  page shows other runs than the results contain, if a
                                  section quotes a measurement without its command, or if
                                  a picture differs from the data that it is drawn from

A table is enclosed by the lines `<!-- figures: NAME -->` and `<!-- end -->`, where NAME is a
key of TABLES. It is indented like the first of them.
"""
import argparse
import json
import pathlib
import re
import statistics
import sys
import textwrap

import draw_steps
import plot_frontier

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
MIB = 2**20
GIB = 2**30


def speed():
    return json.loads((RESULTS / "speed-h200" / "speed.json").read_text())


def records(name, kind="run"):
    """The records of a study; the last one of each run id."""
    lines = (RESULTS / name / "results.jsonl").read_text().splitlines()
    every = [json.loads(line) for line in lines]
    found = {}
    for i, record in enumerate(every):
        if record["type"] == kind:
            found[record.get("id", i)] = record
    return list(found.values())


def done(name, system="reprise"):
    return [run for run in records(name)
            if run["status"] == "done" and run["system"] == system]


def rate_text(rate):
    """At least three digits, and all digits of an integer."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def ratio_text(ratio):
    return f"{ratio:.0f}" if ratio >= 20 else f"{ratio:.1f}" if ratio >= 2 else f"{ratio:.2f}"


def gib_text(value):
    return "" if value is None else f"{value:.3g}" if value >= 1 else f"{value:.2f}"


def table(head, rows):
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in
                     [head[0], head[1], *rows])


def speed_table():
    rows = []
    for line in speed()["lines"]:
        ours, theirs = line["ours"], line["theirs"]
        rows.append([line["training"], rate_text(ours["rate"]), gib_text(ours["peak_gib"]),
                     f"{line['floor_share']:.0%}".replace("%", " %")
                     if "floor_share" in line else "",
                     line["peer"], rate_text(theirs["rate"]), gib_text(theirs["peak_gib"]),
                     ratio_text(ours["rate"] / theirs["rate"])])
    return table((["training", "Reprise", "peak", "of the limit", "peer", "speed", "peak",
                   "ratio"],
                  ["---", "--:", "--:", "--:", "---", "--:", "--:", "--:"]), rows)


# Cases and their labels. The first row of each unit names the unit.
SHORT = [
    ("bert-bf16-1x4", "BERT-Large, bf16, 1 × 4"),
    ("bert-bf16-1x4-budget", "BERT-Large, bf16, 1 × 4, in the memory of HF's checkpointing"),
    ("bert-fp32-32x1", "BERT-Large, fp32, 32 × 1"),
    ("gpt2-1x32", "GPT-2 124M, bf16, 1 × 32"),
    ("gpt2-4x8-llmc", "GPT-2 124M, 4 × 8, in the memory of llm.c"),
    ("gpt2-32x1-12GiB", "GPT-2 124M, 32 × 1, within 12 GiB"),
    ("xl-1x8-llmc", "GPT-2 1.5B, 1 × 8, in the memory of llm.c"),
    ("vit-b16-128x1-6GiB", "ViT-B/16, 224², 128 × 1, within 6 GiB"),
    ("resnet50-256x1-compile", "ResNet-50, 224², 256 × 1"),
    ("resnet50-256x1-budget", "the same in the memory of activation budget 0.5"),
    ("cnn-blocks-112-1x64", "five convolutions, 112², 1 × 64"),
]


def speed_short():
    lines = {line["case"]: line for line in speed()["lines"]}
    rows, unit = [], None
    for case, words in SHORT:
        line = lines[case]
        ours, theirs = line["ours"], line["theirs"]
        named = "" if line["unit"] == unit else " " + line["unit"]
        unit = line["unit"]
        rows.append([words, rate_text(ours["rate"]) + named,
                     f"{rate_text(theirs['rate'])} ({line['peer']})",
                     ratio_text(ours["rate"] / theirs["rate"]) + " ×",
                     f"{gib_text(ours['peak_gib'])} / {gib_text(theirs['peak_gib'])}"])
    return table((["training", "Reprise", "peer", "speed", "peak, GiB"],
                  ["---", "--:", "--:", "--:", "--:"]), rows)


def compilers_table():
    rows = [[one["training"], rate_text(one["rate"]), gib_text(one["peak_gib"]),
             rate_text(one["ours"]), ratio_text(one["ours"] / one["rate"])]
            for one in speed()["compilers"]]
    return table((["training", "peer", "peak", "Reprise", "ratio"],
                  ["---", "--:", "--:", "--:", "--:"]), rows)


def bert_table():
    peers = {run["label"]: run["figures"] for run in done("bert-h200", "transformers")}
    rows = []
    for run in done("bert-h200"):
        cells = [run["label"]]
        for figures in (run["figures"], peers.get(run["label"])):
            cells += ([rate_text(figures["samples_per_s"]),
                       f"{figures['peak_bytes'] / MIB:.0f} MiB"] if figures else ["–", "–"])
        rows.append(cells)
    order = [variant["label"] for variant in bert_variants()]
    rows.sort(key=lambda cells: order.index(cells[0]))
    return table((["", "Reprise", "peak", "HF Trainer", "peak"],
                  ["---", "--:", "--:", "--:", "--:"]), rows)


def bert_variants():
    """The labels in the order of the study file."""
    text = records("bert-h200", "study")[-1]["file"]
    runs = text[:text.find("\nreference:")]
    return [{"label": label} for label in re.findall(r'label: "([^"]*)"', runs)]


def checkpoints_table():
    runs = {run["case"]["recompute"]: run["figures"] for run in done("checkpoints-cpu")}
    reference = {row["case"]["recompute"]: row for row in
                 records("checkpoints-cpu", "study")[-1]["reference"]["rows"]
                 if row["case"].get("model", "cnn-profile") == "cnn-profile"}
    none = runs["none"]
    rows = [["none", f"{none['kept_bytes'] / GIB:.2f} GiB", "",
             f"{none['peak_bytes'] / GIB:.2f} GiB", f"{none['step_ms'] / 1000:.1f} s", ""]]
    for name, figures in sorted(runs.items(), key=lambda item: item[1]["kept_bytes"]):
        if name == "none":
            continue
        published = reference.get(name, {})
        rows.append([name, f"{figures['kept_bytes'] / none['kept_bytes']:.3f}",
                     f"{published['kept_ratio']:.3f}" if published.get("kept_ratio") else "",
                     f"{figures['peak_bytes'] / none['peak_bytes']:.2f}",
                     f"{figures['step_ms'] / none['step_ms']:.2f}",
                     f"{published['time_ratio']:.2f}" if published.get("time_ratio") else ""])
    return table((["", "kept after the forward", "published", "true peak", "time",
                   "published"], ["---", "--:", "--:", "--:", "--:", "--:"]), rows)


def changes(pairs, figure):
    """Relative changes in percent: median, smallest, largest."""
    values = sorted(100 * (after[figure] / before[figure] - 1) for before, after in pairs)
    middle = statistics.median(values)
    return middle, values[0], values[-1]


def mnist_pairs():
    """Pairs of the same setting without and with recomputation."""
    runs = {}
    for run in done("mnist-h200"):
        key = json.dumps({k: v for k, v in run["case"].items() if k != "recompute"},
                         sort_keys=True)
        runs.setdefault(key, {})[run["case"]["recompute"]] = run["figures"]
    return [(one["none"], next(v for k, v in one.items() if k != "none"))
            for one in runs.values() if len(one) == 2]


def mnist_text():
    pairs = mnist_pairs()
    kept, time, peak = (changes(pairs, figure)
                        for figure in ("kept_bytes", "step_ms", "peak_bytes"))
    low, _, high = statistics.quantiles(
        [100 * (after["step_ms"] / before["step_ms"] - 1) for before, after in pairs], n=4)
    blocks = {}
    for before, _ in pairs:
        at = before["peak_at"]
        where = f"the {at['phase']} of `{at['stage']}`" if at["stage"] else f"the {at['phase']}"
        blocks[where] = blocks.get(where, 0) + 1
    most, count = max(blocks.items(), key=lambda item: item[1])
    return (f"{len(done('mnist-h200'))} runs: {len(pairs)} settings, each without and with "
            f"recomputation. Recomputation reduces\n"
            f"the memory kept after the forward by {-kept[0]:.0f} % (median; {-kept[2]:.0f} to "
            f"{-kept[1]:.0f} %) and makes a step\n"
            f"{time[0]:.0f} % longer ({time[1]:.0f} to {time[2]:.0f} %; {low:.0f} to "
            f"{high:.0f} % for the middle half of the settings).\n"
            f"The peak changes by {peak[0]:.1f} % ({peak[1]:.1f} to {peak[2]:.1f} %): it is set "
            f"by {most}\nin {count} of {len(pairs)} settings.")


def digits_text(value):
    """All digits, at least three."""
    text = f"{value:g}"
    return text if len(text) > 4 else f"{value:#.3g}"


def budgets_table():
    points = plot_frontier.budgets()["points"]
    rows = []
    for point in reversed(points):
        memory, predicted = point["memory_gib"], point["predicted_gib"]
        rows.append(["none" if memory is None else f"{memory:g} GiB",
                     f"{point['micro_batch']} × {point['micro_batches']}",
                     f"{digits_text(point['host_gib'])} GiB" if point["host_gib"] else "–",
                     f"{digits_text(point['peak_gib'])} GiB"
                     + (f", {digits_text(predicted)}" if predicted else ""),
                     rate_text(point["tokens_per_s"]), plot_frontier.share_text(point, points)])
    return table((["`--memory`", "micro-batch", "in host memory", "peak, predicted", "tokens/s",
                   "share"], ["--:"] * 6), rows)


def sources_table():
    rows = []
    for name in ("mnist-h200", "bert-h200", "checkpoints-cpu"):
        runs = done(name)
        newest = max(run["started"] for run in runs)[:10]
        version = runs[-1]["versions"]
        rows.append([f"`{name}`", runs[-1]["device"]["name"], f"Reprise {version['reprise']}, "
                     f"LibTorch {version['libtorch']}", newest, str(len(runs))])
    data = speed()
    rows.append(["`speed-h200`", data["device"], f"Reprise {data['reprise']}, LibTorch "
                 f"{data['libtorch']}", data["measured"], str(len(data["lines"]))])
    data = plot_frontier.budgets()
    rows.append(["`budgets-h200`", data["device"], f"Reprise {data['reprise']}, LibTorch "
                 f"{data['libtorch']}", data["measured"], str(len(data["points"]))])
    return table((["directory", "device", "versions", "measured", "runs"],
                  ["---", "---", "---", "---", "--:"]), rows)


TABLES = {
    "speed": speed_table, "speed-short": speed_short, "compilers": compilers_table,
    "bert": bert_table, "checkpoints": checkpoints_table, "mnist": mnist_text,
    "sources": sources_table, "budgets": budgets_table,
}
BLOCK = re.compile(r"^(( *)<!-- figures: ([\w-]+) -->\n)(.*?)(\n *<!-- end -->)",
                   re.DOTALL | re.MULTILINE)


def documents():
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), RESULTS / "README.md"]


def filled(text):
    """The text with every table regenerated from the results."""
    def fill(match):
        return match[1] + textwrap.indent(TABLES[match[3]](), match[2]) + match[5]
    return BLOCK.sub(fill, text)


# Settings that two results contain: a line of speed.json, a study and the case in it. Speeds
# may differ by SAME_WITHIN; machines of the same type differ by a tenth.
SAME = [
    ("bert-bf16-1x4", "bert-h200", {"precision": "bf16", "batch": "1", "recompute": None}),
    ("bert-bf16-1x4-all", "bert-h200",
     {"precision": "bf16", "batch": "1", "recompute": "all"}),
    ("bert-fp32-1x4", "bert-h200",
     {"precision": None, "batch": "1", "recompute": None, "optimizer": "adamw"}),
    ("bert-fp32-1x4-all", "bert-h200",
     {"precision": None, "batch": "1", "recompute": "all", "optimizer": "adamw"}),
]
SAME_WITHIN = 0.2


def contradictions():
    lines = {line["case"]: line for line in speed()["lines"]}
    for case, study, wanted in SAME:
        found = [run for run in done(study)
                 if all(str(run["case"].get(key)) == str(value)
                        for key, value in wanted.items())]
        if len(found) != 1:
            yield f"{study}: expected one run of {wanted}, found {len(found)}"
            continue
        figures = found[0]["figures"]
        for what, mine, other in (
                ("speed", lines[case]["ours"]["rate"], figures["samples_per_s"]),
                ("peak", lines[case]["ours"]["peak_gib"], figures["peak_bytes"] / GIB)):
            if abs(mine / other - 1) > (SAME_WITHIN if what == "speed" else 0.03):
                yield (f"{what} of {case} is {mine:g} in speed-h200 and {other:g} in {study} "
                       f"({found[0]['label']})")


def page_contradictions():
    """Differences between the runs of the page and those of the results."""
    page = (RESULTS / "report.html").read_text()
    for name in ("mnist-h200", "bert-h200", "checkpoints-cpu"):
        for run in records(name):
            if run["id"] not in page:
                yield f"report.html lacks run {run['id']} of {name}"
                break
    ids = {run["id"] for name in ("mnist-h200", "bert-h200", "checkpoints-cpu")
           for run in records(name)}
    for other in set(re.findall(r'"id": ?"([0-9a-f]{16})"', page)) - ids:
        yield f"report.html has run {other}, which no result contains"
        break


# A measurement: a number with a unit of speed or time, or a relative change.
MEASURED = re.compile(r"\d[\d.,]* ?(?:samples/s|images/s|tokens/s|img/s|TFLOP/s|TB/s|ms\b|µs\b"
                      r"|times (?:as fast|its)|% (?:more|less|lower|faster|slower|longer))")
COMMAND = re.compile(r"(?:\./|\b)(?:reprise (?:train|plan|study|profile|verify|report|launch)"
                     r"|bench/[\w/]+\.?(?:py|sh)?|\w+_bench\b|scripts/\w+\.(?:sh|py))")


def sections(text):
    """Heading and text of each section, including code."""
    parts = re.split(r"^(#+ .*)$", text, flags=re.M)
    yield "introduction", parts[0]
    yield from zip(parts[1::2], parts[2::2])


def unsourced():
    for path in documents():
        for heading, body in sections(path.read_text()):
            prose = re.sub(r"^    .*$|```.*?```", "", body, flags=re.M | re.DOTALL)
            found = MEASURED.search(prose)
            if found and not COMMAND.search(body):
                yield (f"{path.relative_to(ROOT)}, {heading.strip('# ')}: '{found[0]}' without "
                       "the command that measures it")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    wrong = []
    for path in documents():
        text = path.read_text()
        for name in re.findall(r"<!-- figures: ([\w-]+) -->", text):
            if name not in TABLES:
                sys.exit(f"{path.relative_to(ROOT)}: expected one of {', '.join(TABLES)}, "
                         f"got {name}")
        new = filled(text)
        if new == text:
            continue
        if arguments.check:
            wrong.append(f"{path.relative_to(ROOT)} differs from docs/results; run "
                         "scripts/figures.py")
        else:
            path.write_text(new)
            print(f"{path.relative_to(ROOT)} rewritten")
    if not arguments.check:
        draw_steps.write()
        plot_frontier.write()
    wrong += [*contradictions(), *page_contradictions(), *unsourced(), *draw_steps.problems(),
              *plot_frontier.problems()]
    for text in wrong:
        print(f"figures: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
