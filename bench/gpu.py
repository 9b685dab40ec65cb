"""Compares Reprise with PyTorch techniques on one CUDA machine, in one run.

    python3 bench/gpu.py build/cuda/tools/reprise/reprise [--only gpt2-1x32 …]
    python3 bench/gpu.py REPRISE --model resnet50 --batch 256 --precision bf16 \\
        --memory 6.1GiB --techniques eager compile compile-budget:0.5
    python3 bench/gpu.py REPRISE --plain

The first compares the trainings of bench/lines.py, the second any model of the zoo that has
a PyTorch twin (bench/peers/zoo.py), the third models of plain LibTorch layers, which
bench/plain has as a plug-in, within the memory of eager PyTorch.

Reprise, without any tuning flags, and every peer start from the same weights and train on the
same random samples. The window of an update is the whole dataset, so that the losses of the
first updates must agree. Times are printed only if they do: the median of several updates,
the speedup of Reprise, the peak of live tensors, and the ratio of a lower bound to the step
time. The lower bound is counted in the twin: peers/floor.py has the passes, lines.py the
time of each. Models with dropout are compared without and timed with it.

Techniques are those of bench/peers/twin.py. Some lines with BERT-Large are compared with the
Hugging Face Trainer, without losses. `llmc`, or `llmc:1` and `llmc:2` with its recomputation,
is llm.c's train_gpt2cu, whose path --llmc gives.

    python3 bench/gpu.py NEW --against OLD

compares two builds of Reprise instead, which run in turn without peers. Budgets are the
shares of the peaks in docs/results/speed-h200/speed.json.

With --device cpu, sizes such as --depth 2 --width 64 --image-size 64, and --precision fp32
losses can be compared without a GPU.
"""
import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from lines import LINES, Line, plain_lines, zoo

HERE = pathlib.Path(__file__).resolve().parent
GIB = 2**30


class Skipped(RuntimeError):
    pass


def failure(error):
    return f"{'skipped' if isinstance(error, Skipped) else 'failed'}: {error}"


def run(command, seconds=None):
    """Runs a command for at most `seconds` and returns its standard output."""
    try:
        answer = subprocess.run([str(word) for word in command], capture_output=True,
                                text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done after {seconds:g} s; --patience gives it longer") from None
    if answer.returncode != 0:
        words = (answer.stderr or answer.stdout).strip().splitlines()
        raise RuntimeError(words[-1][:200] if words else f"status {answer.returncode}")
    return answer.stdout


def peer_script(name, *words, seconds=None):
    return run([sys.executable, HERE / "peers" / name, *words], seconds)


class Bench:
    def __init__(self, arguments, work):
        self.arguments, self.work = arguments, work
        self.reprise, self.device = arguments.reprise, arguments.device
        self.keep = arguments.keep
        self.kept_answers = {}
        if self.keep and self.keep.exists():
            self.kept_answers = json.loads(self.keep.read_text())
        self.rates = ({} if arguments.against or self.device == "cpu" else
                      self.answer("rates", lambda: json.loads(peer_script("rates.py"))))

    def answer(self, key, ask):
        """Returns the result `key`, which is computed once, or with --keep once for all
        calls."""
        if key not in self.kept_answers:
            print(f"… {key}", file=sys.stderr, flush=True)
            self.kept_answers[key] = ask()
            if self.keep:
                self.keep.write_text(json.dumps(self.kept_answers))
        return self.kept_answers[key]

    def weights_path(self, line):
        name = "-".join(word.strip("-") for word in line.model_words()) + ".safetensors"
        return self.work / name

    def weights(self, line):
        """The file of random weights, which is created once."""
        path = self.weights_path(line)
        if not path.exists():
            partial = path.with_suffix(".partial")
            peer_script("twin.py", "weights", partial, *line.model_words(),
                        "--device", self.device)
            os.replace(partial, path)
        return path

    def peer(self, line, technique):
        """Trains with a technique of PyTorch and returns losses, speed and peak."""
        sizes = ["--micro", line.micro, "--accumulate", line.accumulate]
        if technique.startswith("llmc"):
            script, words = "llmc.py", ["--model", line.model, "--seq", line.options["seq"]]
            if not self.arguments.llmc:
                raise Skipped("--llmc gives the path of llm.c's train_gpt2cu")
            more = ["--binary", self.arguments.llmc, "--recompute",
                    technique.partition(":")[2] or "0"]
        elif line.trainer:
            script, words = "bert_trainer.py", ["--precision", line.precision]
            more = ["--technique", technique]
        else:
            script, words = "twin.py", [*line.twin_words(), "--device", self.device]
            more = ["--technique", technique]

        def ask():
            weights = ["--weights", self.weights(line)] if script == "twin.py" else []
            return json.loads(peer_script(
                script, "train", *words, *sizes, *weights, *more,
                seconds=self.arguments.patience).splitlines()[-1])
        key = " ".join(str(word) for word in (script, *words, *sizes[1::2], technique))
        return self.answer(key, ask)

    def floor_seconds(self, line):
        """Lower bound of the time of an update; 0 if it is not known."""
        if not self.rates:
            return 0
        words = [*line.model_words(), "--device", self.device]
        count = self.answer("count " + " ".join(words), lambda: json.loads(
            peer_script("twin.py", "count", *words).splitlines()[-1]))
        return line.floor_seconds(count, self.rates)

    def ours(self, line, memory, timed, build=None):
        """Trains with Reprise and returns its summary. If not `timed`, saves the run and adds
        the loss of each update. With `build`, uses this program and its random weights."""
        print(f"… {line.name} by ours", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            out = "none" if timed else pathlib.Path(folder) / "run"
            sizes = (["--global-batch", line.window] if line.free_micro and memory else
                     ["--batch", line.micro, "--accumulate", line.accumulate])
            weights = [] if line.trainer or build else ["--weights", self.weights(line)]
            plugin = ["--plugin", self.arguments.plugin] if line.spec.plain else []
            summary = json.loads(run(
                [build or self.reprise, "train", *plugin, *line.command_flags(timed), *weights,
                 "--data", "random", "--random-samples", 512 if line.trainer else line.window,
                 "--steps", 6 if self.device == "cpu" else 14, "--no-eval",
                 "--device", self.device, "--format", "json", "--out", out, *sizes,
                 *(["--memory", memory] if memory else [])]))
            if timed:
                return summary
            lines = (out / "metrics.jsonl").read_text().splitlines()
            return {**summary, "losses": [json.loads(line)["loss"] for line in lines]}

    def memory(self, line):
        """The budget, with shares of a peer's peak converted to bytes."""
        if not isinstance(line.memory, tuple):
            return line.memory
        share, technique = line.memory
        peak = self.peer(line, technique)["peak_bytes"]
        return int(share * peak) or None  # peers have no peak on a CPU

    def versions(self):
        """Returns the device name and the versions of Reprise and LibTorch."""
        import torch
        build = json.loads(run([self.reprise, "--version", "--format", "json"]))
        return {"device_name": torch.cuda.get_device_name() if self.rates else "CPU",
                "version": build["version"], "libtorch": build["libtorch"]}


def shown(rate):
    """Formats a rate with at least three digits, so that ratios can be checked by hand."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def apart(ours, theirs):
    """Largest relative difference, infinite if a loss is not a number. Losses below a tenth of
    the first one, of samples learnt by heart, are compared with that tenth."""
    return max((abs(a - b) / max(abs(b), abs(theirs[0]) / 10) if a == a and b == b
                else float("inf") for a, b in zip(ours, theirs)), default=0)


def ask_peers(bench, line):
    for technique in line.techniques:
        try:
            theirs = bench.peer(line, technique)
            print(f"{line.name:24} {technique:18} "
                  f"{shown(theirs['samples_per_s'] * line.scale):>12} "
                  f"{'':7} {theirs['peak_bytes'] / GIB:8.2f}", flush=True)
        except RuntimeError as error:
            print(f"{line.name:24} {technique:18} {failure(error)}", flush=True)


def keep_line(path, line, technique, ours, theirs, share):
    """Writes both results to the entry of `line` and `technique` in the file `path`, from
    which scripts/figures.py generates the tables. Adds the entry if necessary. `share`: of the
    floor, or 0."""
    data = json.loads(path.read_text()) if path.exists() else {"lines": []}
    data.update(device=ours["device_name"], libtorch=ours["libtorch"],
                reprise=ours["version"], measured=datetime.date.today().isoformat())
    for entry in data["lines"]:
        if (entry["case"], entry["technique"]) == (line.name, technique):
            break
    else:
        entry = {"case": line.name, "training": line.name, "unit": line.unit,
                 "technique": technique, "peer": technique}
        data["lines"].append(entry)
    for key, one in (("ours", ours), ("theirs", theirs)):
        entry[key] = {"rate": float(f"{one['rate']:.6g}"),
                      "peak_gib": float(f"{one['peak_bytes'] / GIB:.3g}")}
    if share:
        entry["floor_share"] = float(f"{share:.2g}")
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def run_ours(bench, line, repeats):
    """Losses of Reprise, and the summaries of its timed runs."""
    memory = bench.memory(line)
    ours, losses = [], []
    if not line.trainer:
        first = bench.ours(line, memory, False)
        losses = first["losses"]
        if not line.different_when_timed():
            ours.append(first)
    while len(ours) < repeats:
        ours.append(bench.ours(line, memory, True))
    return losses, ours


def show_line(bench, line, repeats, json_path=None):
    """Prints the results of a line. Returns False if a run failed or the losses differ."""
    try:
        losses, ours = run_ours(bench, line, repeats)
    except RuntimeError as error:
        print(f"{line.name:24} {'reprise':18} {failure(error)}", flush=True)
        return False
    speed = statistics.median(one["samples_per_s"] for one in ours) * line.scale
    first, peak = ours[0], max(one["peak_bytes"] for one in ours)
    tolerance = bench.arguments.tolerance or line.tolerance
    rows, good = [], True
    try:
        share = speed * bench.floor_seconds(line) / (line.window * line.scale)
    except RuntimeError as error:
        share = 0
        rows.append(f"{line.name:24} {'floor':18} {failure(error)}")
    for technique in line.techniques:
        head = f"{line.name:24} {technique:18} "
        try:
            theirs = bench.peer(line, technique)
        except RuntimeError as error:
            rows.append(f"{head}{failure(error)}")
            continue
        worst = apart(losses, theirs["losses"])
        if worst > tolerance:
            good = False
            rows.append(f"{head}losses DIFFER by {worst:.1e}: "
                        f"{theirs['losses']} against {losses[:4]}")
            continue
        rate = theirs["samples_per_s"] * line.scale
        if json_path:
            keep_line(json_path, line, technique,
                      {"rate": speed, "peak_bytes": peak, **bench.versions()},
                      {"rate": rate, "peak_bytes": theirs["peak_bytes"]}, share)
        rows.append(f"{head}{shown(rate):>12} {speed / rate:7.2f} "
                    f"{theirs['peak_bytes'] / GIB:8.2f}          " +
                    (f"losses within {worst:.1e}" if theirs["losses"] else ""))
    if good:
        of_floor = f"{share:8.0%}" if share else " " * 8
        print(f"{line.name:24} {'reprise':18} {shown(speed):>12} {'':7} "
              f"{peak / GIB:8.2f} {of_floor} graph {first.get('graph')}, "
              f"{first['micro_batch']} × {first['accumulate']}, {first['recompute']}")
    print("\n".join(rows), flush=True)
    return good


def published_peak(name, technique):
    """Peak of a peer in the published results, in bytes."""
    path = HERE.parent / "docs/results/speed-h200/speed.json"
    for line in json.loads(path.read_text())["lines"]:
        if (line["case"], line["technique"]) == (name, technique):
            return line["theirs"]["peak_gib"] * GIB
    raise RuntimeError(f"{path.name} has no {technique} for {name}")


def compare_builds(bench, line, other, repeats):
    """Prints the speeds of two builds, which run in turn, and their ratio. Returns False if
    a run failed."""
    builds = (bench.reprise, other)
    speeds, peaks = ([], []), [0, 0]
    try:
        memory = line.memory
        if isinstance(memory, tuple):
            memory = int(memory[0] * published_peak(line.name, memory[1]))
        for _ in range(repeats):
            for i, build in enumerate(builds):
                summary = bench.ours(line, memory, True, build)
                speeds[i].append(summary["samples_per_s"] * line.scale)
                peaks[i] = max(peaks[i], summary["peak_bytes"])
    except RuntimeError as error:
        print(f"{line.name:24} {failure(error)}", flush=True)
        return False
    new, old = (statistics.median(found) for found in speeds)
    spread = max((max(found) - min(found)) / statistics.median(found) for found in speeds)
    new_peak, old_peak = peaks
    print(f"{line.name:24} {shown(new):>12} {shown(old):>12} {new / old:7.3f} {spread:7.1%} "
          f"{new_peak / GIB:8.2f} {old_peak / GIB:8.2f}", flush=True)
    return True


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reprise")
    parser.add_argument("--only", nargs="*", metavar="LINE", help="these lines alone")
    parser.add_argument("--list", action="store_true", help="print the names of the lines")
    parser.add_argument("--techniques", nargs="*",
                        help="of the peers, these alone; with --model, these")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tolerance", type=float,
                        help="largest relative difference of the losses; default: 2e-3 for fp32, "
                        "5e-3 for bf16, 2e-2 for bf16 with BatchNorm")
    parser.add_argument("--keep", type=pathlib.Path,
                        help="keep the peers' answers in this file, and take them from it")
    parser.add_argument("--work", type=pathlib.Path,
                        help="folder of the weights, which stay there; default: a temporary "
                        "one")
    parser.add_argument("--patience", type=float, metavar="SECONDS",
                        help="time limit of a peer; compiling can take minutes")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE",
                        help="update the lines of this file, such as "
                        "docs/results/speed-h200/speed.json")
    parser.add_argument("--against", metavar="OLD",
                        help="another build of Reprise to compare with, instead of peers")
    parser.add_argument("--peers-only", action="store_true",
                        help="ask the peers and end, with --keep for a later call")
    parser.add_argument("--llmc", metavar="PATH", help="train_gpt2cu of llm.c")
    parser.add_argument("--plain", action="store_true",
                        help="models of plain LibTorch layers, in the memory of eager PyTorch")
    parser.add_argument("--plugin", metavar="PATH",
                        help="plug-in of --plain; default: in the build of the command")
    own = parser.add_argument_group("one line of your own")
    own.add_argument("--model", choices=zoo.MODELS, metavar="NAME",
                     help=", ".join(zoo.MODELS))
    own.add_argument("--batch", type=int, nargs="*",
                     help="samples per micro-batch (default 32); several give several lines, and "
                     "with --plain replace the usual ones")
    own.add_argument("--accumulate", type=int, default=1)
    own.add_argument("--precision", choices=("fp32", "bf16"),
                     help="default: bf16, for all lines their own")
    own.add_argument("--memory", metavar="SIZE", help="budget of Reprise, such as 6.1GiB")
    own.add_argument("--tf32", action="store_true", help="TF32 in timed fp32 runs of both")
    zoo.add_model_arguments(own)
    arguments = parser.parse_args()
    if not arguments.plugin:
        build = pathlib.Path(arguments.reprise).resolve().parents[2]
        arguments.plugin = build / "bench" / "libplain.so"
    return arguments


def chosen_lines(arguments):
    options = zoo.given_options(arguments)
    if arguments.model:
        precision = arguments.precision or "bf16"
        return [Line("-".join((arguments.model, f"{micro}x{arguments.accumulate}",
                               *(["fp32"] if precision == "fp32" else []),
                               *([arguments.memory] if arguments.memory else []))),
                     arguments.model, micro, arguments.accumulate,
                     arguments.techniques or ["eager"], precision, options, arguments.memory,
                     tf32=arguments.tf32)
                for micro in arguments.batch or [32]]
    lines = list(plain_lines(arguments.batch)) if arguments.plain else LINES
    known = [line.name for line in lines]
    for name in arguments.only or []:
        if name not in known:
            raise SystemExit(f"no line {name}; there are {', '.join(known)}")
    lines = [line for line in lines if not arguments.only or line.name in arguments.only]
    for line in lines:
        line.precision = arguments.precision or line.precision
        if arguments.techniques is not None:
            line.techniques = [t for t in line.techniques if t in arguments.techniques]
    return lines


def compare(bench, arguments, lines):
    if arguments.against:
        print(f"{'line':24} {'new':>12} {'old':>12} {'new/old':>7} {'spread':>7} "
              f"{'GiB':>8} {'GiB old':>8}")
        return [compare_builds(bench, line, arguments.against, arguments.repeats)
                for line in lines]
    if bench.rates:
        print(f"GEMMs {bench.rates['flops'] / 1e12:.0f} TFLOP/s, in TF32 "
              f"{bench.rates['tf32'] / 1e12:.0f}, "
              f"copies {bench.rates['bytes'] / 1e12:.2f} TB/s")
    print(f"{'line':24} {'':18} {'per second':>12} {'ours/it':>7} {'peak GiB':>8} "
          f"{'of floor':>8}")
    good = []
    for i, line in enumerate(lines):
        if arguments.peers_only:
            ask_peers(bench, line)
        else:
            good.append(show_line(bench, line, arguments.repeats, arguments.json))
        path = bench.weights_path(line)
        if not arguments.work and path not in map(bench.weights_path, lines[i + 1:]):
            path.unlink(missing_ok=True)  # some have gigabytes
    return good


def main():
    arguments = parse_arguments()
    try:
        lines = chosen_lines(arguments)
    except RuntimeError as error:
        raise SystemExit(f"gpu.py: {error}") from None
    if arguments.list:
        print("\n".join(line.name for line in lines))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or pathlib.Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        good = compare(Bench(arguments, work), arguments, lines)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
