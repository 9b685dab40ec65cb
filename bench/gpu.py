"""Ours and PyTorch's techniques side by side on one CUDA machine, in one run.

    python3 bench/gpu.py build/cuda/tools/reprise/reprise [--only gpt2-small-micro …]

A case is a model, a micro-batch and an accumulation. Ours and every peer start from
the same weights and see the same tokens; an update's window is the whole data, so that
the losses of the first updates must agree whatever the order of the samples. Only then
are times printed: medians of several updates, the ratio to ours, the peak of tensors of
both, and the distance to the floor: the step's products at the rate of a large product
measured here, plus its weights' and gradients' traffic at the rate of a large copy.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
TOKENS, VOCABULARY = 1024, 50257
SIZES = {"gpt2": (12, 768), "gpt2-xl": (48, 1600)}
LOSS_TOLERANCE = 5e-3  # of the loss; bf16 rounds in other places
GIB = 2**30

# name, size, micro-batch, accumulation, ours' flags, peers' techniques
CASES = [
    ("gpt2-1x32", "gpt2", 1, 32, [],
     ["eager", "compile", "compile-graphs", "graph"]),
    ("gpt2-32x1", "gpt2", 32, 1, [],
     ["eager", "checkpoint", "selective", "compile", "compile-budget"]),
    ("gpt2-32x1-half", "gpt2", 32, 1, ["--memory", "half of eager"], ["eager"]),
    ("xl-1x8-recompute", "gpt2-xl", 1, 8, ["--recompute", "all"],
     ["checkpoint", "graph-checkpoint"]),
    ("xl-8x1-recompute", "gpt2-xl", 8, 1, ["--memory", "that of checkpoint"],
     ["checkpoint", "compile-budget"]),
]


def run(command, **more):
    answer = subprocess.run(command, capture_output=True, text=True, **more)
    if answer.returncode != 0:
        words = (answer.stderr or answer.stdout).strip().splitlines()
        raise RuntimeError(words[-1] if words else f"status {answer.returncode}")
    return answer.stdout


class Bench:
    def __init__(self, arguments, work):
        self.reprise = arguments.reprise
        self.work = work
        self.rates = json.loads(run([sys.executable, str(HERE / "peers/rates.py")]))
        self.peaks = {}  # (size, micro, accumulate, technique) → bytes

    def weights(self, size):
        path = self.work / f"{size}.safetensors"
        if not path.exists():
            run([sys.executable, str(HERE / "peers/gpt2.py"), "weights", str(path),
                 "--size", size])
        return path

    def tokens(self, window):
        import numpy
        path = self.work / f"{window}.bin"
        if not path.exists():
            # Ours leaves the last tenth of a file for evaluation.
            count = int((window * TOKENS + 1) / 0.9) + 2
            numpy.random.default_rng(0).integers(0, VOCABULARY, count,
                                                 dtype=numpy.uint16).tofile(path)
        return path

    def peer(self, size, micro, accumulate, technique):
        answer = json.loads(run(
            [sys.executable, str(HERE / "peers/gpt2.py"), "train", "--size", size,
             "--weights", str(self.weights(size)), "--tokens",
             str(self.tokens(micro * accumulate)), "--micro", str(micro), "--accumulate",
             str(accumulate), "--technique", technique]).splitlines()[-1])
        self.peaks[size, micro, accumulate, technique] = answer["peak_bytes"]
        return answer

    def ours(self, size, micro, accumulate, flags):
        out = pathlib.Path(tempfile.mkdtemp(dir=self.work)) / "run"
        command = [self.reprise, "train", "--model", size, "--dropout", "0",
                   "--weights", str(self.weights(size)),
                   "--data", str(self.tokens(micro * accumulate)),
                   "--precision", "bf16", "--optimizer", "adamw", "--lr", "1e-4",
                   "--weight-decay", "0.01", "--steps", "10", "--no-eval", "--device",
                   "cuda", "--format", "json", "--out", str(out)]
        if "--memory" in flags:
            command += ["--global-batch", str(micro * accumulate)]
        else:
            command += ["--batch", str(micro), "--accumulate", str(accumulate)]
        summary = json.loads(run(command + flags))
        metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return {"losses": [m["loss"] for m in metrics],
                "tokens_per_s": summary["samples_per_s"] * TOKENS,
                "peak_bytes": summary["peak_bytes"], "graph": summary.get("graph")}

    def floor_tokens_per_s(self, size, micro, accumulate, recompute):
        """By the products' arithmetic and by the least traffic of weights."""
        depth, width = SIZES[size]
        block = 12 * width * width
        matrices = depth * block + VOCABULARY * width
        attention = depth * 2 * TOKENS * width  # causal: half of 4·T·C
        forward = 2 * (matrices + attention)
        flops = 3 * forward + (2 * depth * (block + attention // 2) if recompute else 0)
        tokens = micro * accumulate * TOKENS
        # A micro-batch reads the weights twice and adds to the gradients; an update
        # reads and writes weights, gradients and two moments.
        traffic = accumulate * matrices * (2 * 2 + 2 * 4) + matrices * 4 * 7
        seconds = tokens * flops / self.rates["flops"] + traffic / self.rates["bytes"]
        return tokens / seconds


def same_losses(ours, theirs):
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs))
    return worst <= LOSS_TOLERANCE, worst


def budget(bench, flags, size, micro, accumulate):
    """Words in the table become the bytes they stand for."""
    result = list(flags)
    if "--memory" in result:
        i = result.index("--memory") + 1
        share, technique = {"half of eager": (0.5, "eager"),
                            "that of checkpoint": (1, "checkpoint")}[result[i]]
        key = (size, micro, accumulate, technique)
        if key not in bench.peaks:
            bench.peer(*key)
        result[i] = str(int(bench.peaks[key] * share))
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reprise")
    parser.add_argument("--only", nargs="*", choices=[case[0] for case in CASES])
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args()
    wrong = []
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(arguments, pathlib.Path(work))
        print(f"products {bench.rates['flops'] / 1e12:.0f} TFLOP/s, "
              f"copies {bench.rates['bytes'] / 1e12:.2f} TB/s")
        print(f"{'case':18} {'':18} {'tokens/s':>10} {'ours / it':>9} {'peak':>10} "
              f"{'of floor':>8}  losses")
        for name, size, micro, accumulate, flags, peers in CASES:
            if arguments.only and name not in arguments.only:
                continue
            try:
                real = budget(bench, flags, size, micro, accumulate)
                ours = [bench.ours(size, micro, accumulate, real)
                        for _ in range(arguments.repeats)]
            except RuntimeError as error:
                wrong.append(name)
                print(f"{name:18} {'reprise':18} failed: {error}")
                continue
            speed = statistics.median(o["tokens_per_s"] for o in ours)
            recompute = "--recompute" in flags
            floor = bench.floor_tokens_per_s(size, micro, accumulate, recompute)
            rows = [("reprise", speed, 1.0, ours[0]["peak_bytes"],
                     f"graph {ours[0]['graph']}")]
            agreed = True
            for technique in peers:
                try:
                    theirs = bench.peer(size, micro, accumulate, technique)
                except RuntimeError as error:
                    rows.append((technique, None, None, None, f"failed: {error}"))
                    continue
                same, worst = same_losses(ours[0]["losses"], theirs["losses"])
                agreed = agreed and same
                rows.append((technique, theirs["tokens_per_s"],
                             speed / theirs["tokens_per_s"], theirs["peak_bytes"],
                             f"within {worst:.1e}" if same else f"DIFFER by {worst:.1e}"))
            if not agreed:
                wrong.append(name)
                print(f"{name:18} no times: " +
                      "; ".join(f"{row[0]} {row[4]}" for row in rows[1:]))
                continue
            for who, rate, ratio, peak, words in rows:
                if rate is None:
                    print(f"{name:18} {who:18} {words}")
                    continue
                print(f"{name:18} {who:18} {rate:10,.0f} {ratio:9.2f} "
                      f"{peak / GIB:6.2f} GiB {rate / floor:8.0%}  {words}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
