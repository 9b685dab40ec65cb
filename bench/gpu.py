"""Compares Reprise with PyTorch techniques on one CUDA machine, in one run.

    python3 bench/gpu.py build/cuda/tools/reprise/reprise [--only gpt2-1x32 …]

Reprise and every peer start from the same weights and train on the same samples. The
window of an update is the whole dataset, so that the losses of the first updates must
agree for any order of the samples. Times are printed only if they do: the median of
several updates, the speedup of Reprise, the peak of live tensors, and the ratio to a lower
bound of the step time. The lower bound is the time of the matrix products at the measured
rate of a large product (for single precision a third of the TF32 rate), plus the time of
the minimal memory traffic of weights, gradients and images at the measured rate of a large
copy. BERT-Large is compared with the Hugging Face Trainer; its losses cannot be compared
because it has dropout, but scripts/compare_models.sh compares the model itself.

    python3 bench/gpu.py NEW --against OLD

compares two builds of Reprise instead, which run in turn without peers. Budgets are the
shares of the peaks in docs/results/speed-h200/speed.json.
"""
import argparse
import datetime
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
GIB = 2**30


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


class Gpt2:
    """GPT-2 in bf16 with 1024 tokens per sample and AdamW. Speeds are in tokens/s."""
    unit, scale, tolerance = "tokens/s", 1024, 5e-3  # bf16 rounds differently
    timed_flags = []
    sizes = {"gpt2": (12, 768), "gpt2-xl": (48, 1600)}
    vocabulary = 50257
    flags = ["--dropout", 0, "--precision", "bf16", "--optimizer", "adamw",
             "--weight-decay", 0.01]

    def __init__(self, model):
        self.model = model

    def peer(self, work, window):
        return ["gpt2.py", "--size", self.model]

    def make_data(self, path, window):
        import numpy
        # Reprise reserves the last tenth of a file for evaluation.
        count = int((window * 1024 + 1) / 0.9) + 2
        path = path.with_suffix(".bin")
        numpy.random.default_rng(0).integers(0, self.vocabulary, count,
                                             dtype=numpy.uint16).tofile(path)
        return path, ["--tokens", path]

    def floor_seconds(self, rates, micro, accumulate, recompute):
        """Lower bound from the matrix products and the minimal traffic of the weights."""
        depth, width = self.sizes[self.model]
        block = 12 * width * width
        matrices = depth * block + self.vocabulary * width
        attention = depth * 1024 * width  # causal: half of two products of T·C
        forward = 2 * (matrices + attention)
        again = 2 * (depth * block + attention) if recompute else 0
        tokens = micro * accumulate * 1024
        # A micro-batch reads half-precision weights twice and adds to the gradients in
        # single precision; an update reads and writes weights, gradients and moments.
        traffic = accumulate * matrices * (2 * 2 + 2 * 4) + matrices * 4 * 7
        return tokens * (3 * forward + again) / rates["flops"] + traffic / rates["bytes"]


class Cnn:
    """CNNs in fp32 with enlarged images and Adam. Losses are compared without TF32, times
    with TF32, which is PyTorch's default for convolutions."""
    unit, scale, tolerance = "images/s", 1, 2e-3
    timed_flags = ["--tf32"]
    flags = ["--optimizer", "adam"]

    def __init__(self, model, size):
        self.model, self.size = model, size
        # BatchNorm cannot normalize one sample of one pixel.
        self.norm = "group" if model == "cnn-basic" and size == 112 else "batch"
        self.flags = [*Cnn.flags, "--image-size", size,
                      *(["--norm", self.norm] if model == "cnn-basic" else [])]

    def peer(self, work, window):
        return ["cnn.py", "--model", self.model, "--size", self.size, "--norm", self.norm]

    def make_data(self, path, window):
        peer_script("cnn.py", "data", path, "--samples", window)
        return path / "train-images-idx3-ubyte", ["--data", path]

    def blocks(self):
        """Yields channels and image size before and after each convolution, its kernel
        size, and the image size after the pooling."""
        side, channels = self.size, 1
        if self.model == "cnn-blocks":
            for following in (16, 32, 64, 64, 64):
                yield channels, side, following, side, 3, side // 2
                side, channels = side // 2, following
            return
        for following in range(8 * (self.WHOLE // self.size).bit_length(), 97, 8):
            after = (side + 2 * (following == 80)) // 2
            yield channels, side, following, after, 2, after
            side, channels = after, following

    WHOLE = 3584  # largest image of cnn-basic; smaller ones skip the first blocks

    def floor_seconds(self, rates, micro, accumulate, recompute):
        """Lower bound from the convolutions and the minimal traffic of each block. The
        output of the convolution is written, read by the norm and read by its backward, and
        its gradient is written and read. The input of the block is read in forward and
        backward, and its gradient is written except for the image. The output of the block
        is written and its gradient is read."""
        flops = values = 0
        for i, (before, side, after, out, kernel, pooled) in enumerate(self.blocks()):
            first = i == 0
            flops += 2 * kernel**2 * before * after * out**2 * (2 if first else 3)
            values += (5 * after * out**2 + (2 if first else 3) * before * side**2 +
                       2 * after * pooled**2)
        samples = micro * accumulate
        return samples * (flops / rates["tf32"] + 4 * values / rates["bytes"])


class Bert:
    """BERT-Large with 512 random tokens per sample, AdamW and dropout."""
    model, unit, scale, tolerance = "bert-large", "samples/s", 1, 0
    timed_flags = []

    def __init__(self, precision):
        self.precision = precision
        self.flags = ["--seq", 512, "--random-samples", 512, "--optimizer", "adamw",
                      "--precision", precision]

    def peer(self, work, window):
        return ["bert_trainer.py", "--precision", self.precision]

    def make_data(self, path, window):
        return "random", []

    def floor_seconds(self, rates, micro, accumulate, recompute):
        half = self.precision == "bf16"
        matrices, attention = 24 * 12 * 1024 * 1024, 24 * 2 * 512 * 1024
        forward = 2 * (matrices + attention)
        tokens = micro * accumulate * 512
        traffic = accumulate * matrices * (2 * (2 if half else 4) + 8) + 335e6 * 4 * 7
        flops = tokens * forward * (4 if recompute else 3)
        rate = rates["flops"] if half else rates["tf32"] / 3
        return flops / rate + traffic / rates["bytes"]


# Name, family, micro-batch, accumulation, flags of Reprise, techniques of the peer. A
# budget is given as (share, technique): the share of the peak of that technique.
CASES = [
    ("gpt2-1x32", Gpt2("gpt2"), 1, 32, [], ["eager", "compile", "compile-graphs", "graph"]),
    ("gpt2-32x1", Gpt2("gpt2"), 32, 1, [],
     ["eager", "checkpoint", "selective", "compile", "compile-budget"]),
    ("gpt2-32x1-half", Gpt2("gpt2"), 32, 1, ["--memory", (0.5, "eager")], ["eager"]),
    ("xl-1x8", Gpt2("gpt2-xl"), 1, 8, ["--recompute", "all"],
     ["checkpoint", "graph-checkpoint", "checkpoint-compile", "compile-budget"]),
    ("xl-8x1", Gpt2("gpt2-xl"), 8, 1, ["--memory", (1, "checkpoint")],
     ["checkpoint", "checkpoint-compile", "compile-budget"]),
    ("bert-bf16-1x4", Bert("bf16"), 1, 4, [], ["trainer", "compile"]),
    ("bert-bf16-1x4-all", Bert("bf16"), 1, 4, ["--recompute", "all"],
     ["checkpoint", "checkpoint-compile"]),
    ("bert-bf16-1x4-budget", Bert("bf16"), 1, 4, ["--memory", (1, "checkpoint")],
     ["checkpoint"]),
    ("bert-fp32-1x4", Bert("fp32"), 1, 4, [], ["trainer", "compile"]),
    ("bert-fp32-1x4-all", Bert("fp32"), 1, 4, ["--recompute", "all"],
     ["checkpoint", "checkpoint-compile"]),
    *((f"{model}-{size}-{micro}x{accumulate}", Cnn(model, size), micro, accumulate, flags,
       ["eager", "compile", "compile-graphs", "graph"])
      for model in ("cnn-basic", "cnn-blocks")
      for size, micro, accumulate, flags in (
          (112, 1, 64, []), (1792, 16, 1, ["--memory", (0.9, "eager")]),
          (3584, 4, 1, ["--memory", (0.9, "eager")]))),
]


class Bench:
    def __init__(self, arguments, work):
        self.reprise, self.work = arguments.reprise, work
        self.answers = {}  # files created so far, by path
        self.keep = arguments.keep
        self.patience = arguments.patience
        self.kept_answers = {}
        if self.keep and self.keep.exists():
            self.kept_answers = json.loads(self.keep.read_text())
        self.rates = ({} if arguments.against else
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

    def kept(self, name, make):
        """Returns the file `name`, which is created once."""
        path = self.work / name
        if path not in self.answers:
            self.answers[path] = make(path)
        return self.answers[path]

    def weights(self, family):
        script, *words = family.peer(self.work, 0)
        name = "-".join(str(word).strip("-") for word in words) + ".safetensors"

        def make(path):
            if not path.exists():
                peer_script(script, "weights", path, *words)
            return path
        return self.kept(name, make)

    def data(self, family, window):
        return self.kept(f"{type(family).__name__}-{window}",
                         lambda path: family.make_data(path, window))

    def peer(self, family, micro, accumulate, technique):
        window = micro * accumulate
        script, *words = family.peer(self.work, window)

        def ask():
            weights = [] if isinstance(family, Bert) else ["--weights", self.weights(family)]
            return json.loads(peer_script(
                script, "train", *words, *weights, *self.data(family, window)[1],
                "--micro", micro, "--accumulate", accumulate,
                "--technique", technique, seconds=self.patience).splitlines()[-1])
        key = " ".join(str(word) for word in (script, *words, micro, accumulate, technique))
        return self.answer(key, ask)

    def ours(self, family, micro, accumulate, flags, losses, build=None):
        """Trains with Reprise and returns its summary. With `losses`, saves the run and adds
        the loss of each update. With `build`, uses this program and its random weights."""
        window = micro * accumulate
        print(f"… {family.model} {micro} x {accumulate} by ours", file=sys.stderr,
              flush=True)
        folder = tempfile.TemporaryDirectory(dir=self.work)
        out = pathlib.Path(folder.name) / "run" if losses else "none"
        # Another micro-batch would change BatchNorm, and for BERT the comparison.
        sizes = (["--global-batch", window]
                 if "--memory" in flags and isinstance(family, Gpt2)
                 else ["--batch", micro, "--accumulate", accumulate])
        weights = ([] if isinstance(family, Bert) or build else
                   ["--weights", self.weights(family)])
        summary = json.loads(run(
            [build or self.reprise, "train", "--model", family.model, *family.flags, *weights,
             "--data", self.data(family, window)[0], "--lr", 1e-4,
             "--steps", 14, "--no-eval", "--device", "cuda", "--format", "json", "--out", out,
             *sizes, *flags]))
        if not losses:
            return summary
        lines = (out / "metrics.jsonl").read_text().splitlines()
        folder.cleanup()
        return {**summary, "losses": [json.loads(line)["loss"] for line in lines]}

    def versions(self):
        """Returns the device name and the versions of Reprise and LibTorch."""
        import torch
        version, libtorch = run([self.reprise, "--version"]).split(",")
        return {"device_name": torch.cuda.get_device_name(),
                "version": version.split()[-1], "libtorch": libtorch.split()[-1]}

    def flags(self, family, micro, accumulate, flags):
        """Converts shares of a peer's peak to bytes."""
        def real(word):
            if not isinstance(word, tuple):
                return word
            share, technique = word
            return int(share * self.peer(family, micro, accumulate, technique)["peak_bytes"])
        return [real(word) for word in flags]


def shown(rate):
    """Formats a rate with at least three digits, so that ratios can be checked by hand."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def apart(ours, theirs):
    return max((abs(a - b) / abs(b) for a, b in zip(ours, theirs)), default=0)


def ask_peers(bench, case):
    name, family, micro, accumulate, _, techniques = case
    for technique in techniques:
        try:
            theirs = bench.peer(family, micro, accumulate, technique)
            print(f"{name:20} {technique:16} {shown(theirs['samples_per_s'] * family.scale):>12} "
                  f"{'':7} {theirs['peak_bytes'] / GIB:8.2f}", flush=True)
        except RuntimeError as error:
            print(f"{name:20} {technique:16} failed: {error}", flush=True)


def keep_line(path, case, technique, ours, theirs):
    """Writes both results to the line of `case` and `technique` in the file `path`, from
    which scripts/figures.py generates the tables. Adds the line if necessary."""
    data = json.loads(path.read_text()) if path.exists() else {"lines": []}
    data.update(device=ours["device_name"], libtorch=ours["libtorch"],
                reprise=ours["version"], measured=datetime.date.today().isoformat())
    name, family = case[:2]
    for line in data["lines"]:
        if (line["case"], line["technique"]) == (name, technique):
            break
    else:
        line = {"case": name, "training": name, "unit": family.unit,
                "technique": technique, "peer": technique}
        data["lines"].append(line)
    for key, one in (("ours", ours), ("theirs", theirs)):
        line[key] = {"rate": float(f"{one['rate']:.6g}"),
                     "peak_gib": float(f"{one['peak_bytes'] / GIB:.3g}")}
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def show_case(bench, case, repeats, json_path=None):
    """Prints the results of a case. Returns False if a run failed or the losses differ."""
    name, family, micro, accumulate, flags, techniques = case
    try:
        real = bench.flags(family, micro, accumulate, flags)
        ours = []
        if family.tolerance > 0:
            ours.append(bench.ours(family, micro, accumulate, real, True))
        losses = ours[0]["losses"] if ours else []
        if family.timed_flags:  # the run with the losses has other flags
            ours, real = [], [*real, *family.timed_flags]
        while len(ours) < repeats:
            ours.append(bench.ours(family, micro, accumulate, real, False))
    except RuntimeError as error:
        print(f"{name:20} {'reprise':16} failed: {error}", flush=True)
        return False
    speed = statistics.median(one["samples_per_s"] for one in ours) * family.scale
    first = ours[0]
    peak = max(one["peak_bytes"] for one in ours)
    rows, good = [], True
    for technique in techniques:
        try:
            theirs = bench.peer(family, micro, accumulate, technique)
        except RuntimeError as error:
            rows.append(f"{name:20} {technique:16} failed: {error}")
            continue
        worst = apart(losses, theirs["losses"])
        if worst > family.tolerance:
            good = False
            rows.append(f"{name:20} {technique:16} losses DIFFER by {worst:.1e}: "
                        f"{theirs['losses']} against {losses[:4]}")
            continue
        rate = theirs["samples_per_s"] * family.scale
        if json_path:
            keep_line(json_path, case, technique,
                      {"rate": speed, "peak_bytes": peak, **bench.versions()},
                      {"rate": rate, "peak_bytes": theirs["peak_bytes"]})
        rows.append(f"{name:20} {technique:16} {shown(rate):>12} {speed / rate:7.2f} "
                    f"{theirs['peak_bytes'] / GIB:8.2f}          " +
                    (f"losses within {worst:.1e}" if theirs["losses"] else ""))
    if good:
        floor = family.floor_seconds(bench.rates, micro, accumulate, "all" in flags)
        share = (f"{speed * floor / (micro * accumulate * family.scale):8.0%}" if floor
                 else " " * 8)
        print(f"{name:20} {'reprise':16} {shown(speed):>12} {'':7} "
              f"{peak / GIB:8.2f} {share} graph {first.get('graph')}, "
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


def compare_builds(bench, case, other, repeats):
    """Prints the speeds of two builds, which run in turn, and their ratio. Returns False if
    a run failed."""
    name, family, micro, accumulate, flags, _ = case
    speeds, peaks = {bench.reprise: [], other: []}, {}
    try:
        real = [int(word[0] * published_peak(name, word[1])) if isinstance(word, tuple)
                else word for word in flags] + family.timed_flags
        for _ in range(repeats):
            for build, found in speeds.items():
                summary = bench.ours(family, micro, accumulate, real, False, build)
                found.append(summary["samples_per_s"] * family.scale)
                peaks[build] = max(peaks.get(build, 0), summary["peak_bytes"])
    except RuntimeError as error:
        print(f"{name:20} failed: {error}", flush=True)
        return False
    new, old = (statistics.median(found) for found in speeds.values())
    spread = max((max(found) - min(found)) / statistics.median(found)
                 for found in speeds.values())
    new_peak, old_peak = peaks.values()
    print(f"{name:20} {shown(new):>12} {shown(old):>12} {new / old:7.3f} {spread:7.1%} "
          f"{new_peak / GIB:8.2f} {old_peak / GIB:8.2f}", flush=True)
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reprise")
    parser.add_argument("--only", nargs="*", choices=[case[0] for case in CASES])
    parser.add_argument("--techniques", nargs="*", help="of the peers, these alone")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", type=pathlib.Path,
                        help="keep the peers' answers in this file, and take them from it")
    parser.add_argument("--work", type=pathlib.Path,
                        help="for weights and data, which stay there; default: a folder of "
                        "this call's own")
    parser.add_argument("--patience", type=float, metavar="SECONDS",
                        help="for a peer; compiling can take minutes")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE",
                        help="update the lines of this file, such as "
                        "docs/results/speed-h200/speed.json")
    parser.add_argument("--against", metavar="OLD",
                        help="another build of Reprise to compare with, instead of peers")
    parser.add_argument("--peers-only", action="store_true",
                        help="ask the peers and end, with --keep for a later call")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or pathlib.Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        bench = Bench(arguments, work)
        chosen = [case for case in CASES if not arguments.only or case[0] in arguments.only]
        if arguments.against:
            print(f"{'case':20} {'new':>12} {'old':>12} {'new/old':>7} {'spread':>7} "
                  f"{'GiB':>8} {'GiB old':>8}")
            good = [compare_builds(bench, case, arguments.against, arguments.repeats)
                    for case in chosen]
            return 0 if all(good) else 1
        print(f"products {bench.rates['flops'] / 1e12:.0f} TFLOP/s, in TF32 "
              f"{bench.rates['tf32'] / 1e12:.0f}, "
              f"copies {bench.rates['bytes'] / 1e12:.2f} TB/s")
        print(f"{'case':20} {'':16} {'a second':>12} {'ours/it':>7} {'peak GiB':>8} "
              f"{'of floor':>8}")
        wrong = 0
        for case in chosen:
            if arguments.techniques is not None:
                case = (*case[:5], [t for t in case[5] if t in arguments.techniques])
            if arguments.peers_only:
                ask_peers(bench, case)
            else:
                wrong += not show_case(bench, case, arguments.repeats,
                                       arguments.json)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
