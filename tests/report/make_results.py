#!/usr/bin/env python3
"""Writes synthetic, deterministic results of studies for the tests of reports.

    make_results.py OUT [--series POINTS] [--size quick|full]

OUT gets one directory per study: mnist on two devices, checkpoints twice on one,
steps, frontier and deep. The figures follow a simple model of memory and time,
with noise, so that the page resembles that of a real study.
"""
import argparse
import json
import math
import pathlib
import random

GPU = {"name": "NVIDIA H200", "kind": "cuda", "memory_bytes": 150_110_011_392,
       "cores": 132, "driver": "580.82"}
CPU = {"name": "Intel Xeon Platinum, 2 cores", "kind": "cpu",
       "memory_bytes": 25_276_518_400, "cores": 2, "driver": None}
MIB = 1 << 20


class Writer:
    """Writes one results.jsonl: the record of a study, then its runs."""

    def __init__(self, folder, device, points, seed):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "results.jsonl"
        self.file = self.path.open("w")
        self.device = device
        self.points = points
        self.random = random.Random(seed)
        self.count = 0

    def line(self, record):
        self.file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def study(self, name, title, question, views, runs, reference=None):
        self.name = name
        self.line({"type": "study", "study": name, "title": title,
                   "question": question, "views": views, "runs": runs,
                   "file": f"study: {name}\n", "reference": reference,
                   "started": "2026-03-01T08:00:00Z"})

    def noise(self, spread):
        return 1 + spread * (2 * self.random.random() - 1)

    def series(self, seconds, memory, utilisation):
        n = self.points
        gpu = self.device["kind"] == "cuda"
        out = {"t_s": [round(seconds * i / (n - 1), 3) for i in range(n)],
               "memory_bytes": [
                   int(memory * (0.35 + 0.65 * abs(math.sin(i * 0.9))))
                   if i > 2 else 0 for i in range(n)],
               "utilisation": [
                   round(min(100, utilisation * self.noise(0.15)), 1)
                   for _ in range(n)]}
        if gpu:
            out["power_w"] = [round(120 + 5 * utilisation * self.noise(0.1), 1)
                              for _ in range(n)]
            out["clock_mhz"] = [1980 - 15 * (i % 3) for i in range(n)]
        return out

    def run(self, case, figures=None, status="done", reason=None, label=None,
            system="reprise", utilisation=60.0, predicted=None, repeat=1,
            with_series=True):
        self.count += 1
        words = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in case.items())
        record = {
            "type": "run", "study": self.name, "system": system, "case": case,
            "id": f"{self.name}-{self.device['kind']}-{system}-"
                  + "-".join(f"{k}={v}" for k, v in case.items())
                  + f"-{repeat}",
            "label": label, "repeat": repeat, "status": status,
            "reason": reason, "predicted": predicted, "figures": figures,
            "observed": None, "series": None, "device": self.device,
            "versions": {system: "0.1.0", "libtorch": "2.11.0"},
            "host": "node-" + self.device["kind"],
            "command": "reprise train " + words,
            "started": f"2026-03-01T{8 + self.count // 60 % 16:02d}:"
                       f"{self.count % 60:02d}:00Z",
            "wall_s": 12.5}
        if figures:
            gpu = self.device["kind"] == "cuda"
            seen = int(figures["peak_bytes"] * 1.08) + 180 * MIB
            record["wall_s"] = round(figures["time_s"] + 4.2, 2)
            average = {"memory_bytes": int(seen * 0.7),
                       "utilisation": round(utilisation, 2),
                       "power_w": round(120 + 5 * utilisation, 1) if gpu else None,
                       "clock_mhz": 1965 if gpu else None}
            peak = {"memory_bytes": seen,
                    "utilisation": min(100.0, round(utilisation * 1.1, 2)),
                    "power_w": round(140 + 5 * utilisation, 1) if gpu else None,
                    "clock_mhz": 1980 if gpu else None}
            record["observed"] = {
                "source": "nvml" if gpu else "process", "interval_ms": 50,
                "samples": int(figures["time_s"] * 20) + 1,
                "seconds": figures["time_s"], "cost": 0.0021,
                "baseline": {"memory_bytes": 530 * MIB},
                "average": average, "peak": peak}
            if with_series:
                record["series"] = self.series(figures["time_s"], seen, utilisation)
        self.line(record)

    def torn(self):
        self.file.write('{"type": "run", "study": "' + self.name + '", "id": "to')

    def close(self):
        self.file.close()


def figures(model, device, optimizer, recompute, micro, accumulate, sample_ms,
            parts, kept, peak_at, samples=60000, precision="fp32",
            parameters=133_650, time_s=None):
    """The output of `reprise train --format json`. `parts`: bytes per category."""
    samples_per_s = 1000.0 / sample_ms
    whole = micro * accumulate
    peak = sum(parts.values())
    return {
        "model": model, "parameters": parameters, "data": "mnist",
        "device": "cuda:0" if device["kind"] == "cuda" else "cpu",
        "precision": precision, "optimizer": optimizer, "recompute": recompute,
        "micro_batch": micro, "accumulate": accumulate, "global_batch": whole,
        "steps": 40, "skipped": 0,
        "time_s": time_s or 1.2 + 40 * whole / samples_per_s,
        "samples_per_s": samples_per_s, "wait_s": 0.0004,
        "peak_bytes": peak + 3692, "reserved_bytes":
            int(peak * 1.15) if device["kind"] == "cuda" else 0,
        "kept_bytes": kept, "rss_peak_bytes": 332_918_784 + peak,
        "limit_bytes": 0, "window_peak_bytes": peak, "replans": 0,
        "graph": "off", "graph_captures": 0, "graph_replays": 0,
        "loss": 0.2531, "eval_loss": None, "eval_accuracy": None,
        "step_ms": 1000 * whole / samples_per_s,
        "epoch_s": samples / samples_per_s, "predicted": None,
        "peak_at": {"phase": peak_at[0], "stage": peak_at[1]}, "memory": parts}


CHANNELS = {112: 48, 224: 40, 448: 32, 896: 24}


def mnist(folder, device, points, size, seed, torn):
    writer = Writer(folder, device, points, seed)
    most = {"quick": 32, "full": 128}[size]
    cases = [(side, batch, accumulate, optimizer, recompute)
             for side in (112, 224, 448, 896)
             for batch in (4, 8, 16, 32, 64, 128)
             for accumulate in (1, 2, 4, 8, 16, 32)
             if batch * accumulate <= min(most, 32 if side == 896 else 128)
             for optimizer in ("sgd", "adam") for recompute in ("none", "sqrt")]
    writer.study("mnist", "MNIST, enlarged",
                 "What do accumulation and recomputation do to memory, "
                 "utilisation and time an epoch?", ["grid"], len(cases))
    gpu = device["kind"] == "cuda"
    room = 700 * MIB if gpu else 450 * MIB
    for side, batch, accumulate, optimizer, recompute in cases:
        case = {"model": "cnn-basic", "image_size": side, "batch": batch,
                "accumulate": accumulate, "optimizer": optimizer,
                "recompute": recompute, "norm": "batch", "seconds": 20}
        first = CHANNELS[side] * (side // 2) ** 2 * 4
        chain = first * 1.31
        kept = 2 * chain * batch * writer.noise(0.01)
        if recompute == "sqrt":
            kept *= 0.06 + 0.05 * writer.random.random()
        parts = {"parameters": 538_688, "gradients": 534_600,
                 "optimizer": 1_069_200 if optimizer == "adam" else 0,
                 "activations": int(first * 2.05 * batch),
                 "workspace": int(first * 1.64 * batch * writer.noise(0.004)
                                  * (0.985 if recompute == "sqrt" else 1)),
                 "data": batch * side * side * 4}
        peak = sum(parts.values())
        predicted = {"peak_bytes": int(peak * writer.noise(0.03)),
                     "step_ms": 12.5}
        if predicted["peak_bytes"] > 2 * room:
            writer.run(case, status="skipped", predicted=predicted,
                       reason=f"predicted to need {predicted['peak_bytes']} bytes")
            continue
        if peak > room:
            writer.run(case, status="oom", predicted=predicted,
                       reason="out of memory in backward of block1: asked for "
                              f"{parts['workspace']} bytes")
            continue
        if (side, batch, accumulate, optimizer, recompute) == (
                448, 4, 2, "adam", "sqrt"):
            writer.run(case, status="failed", predicted=predicted,
                       reason="the process ended with signal 9")
            continue
        pixel = (0.0000011 if gpu else 0.000021) * side * side
        launch = (0.9 if gpu else 1.5) / batch
        sample_ms = (pixel + launch) * writer.noise(0.03) \
            * (1.24 + 0.12 * writer.random.random() if recompute == "sqrt" else 1) \
            + 0.25 / (batch * accumulate)
        use = min(99.0, 100 * pixel / (pixel + launch) * writer.noise(0.04) + 8)
        moment = ("backward", "block1")
        if recompute == "sqrt" and batch == 4 and side == 112:
            moment = ("recompute", "block2")
        found = figures("cnn-basic", device, optimizer, recompute, batch, accumulate,
                        sample_ms, parts, int(kept), moment)
        if not gpu:
            found["dataset_bytes"] = 47_842_944
        if side == 448 and (batch, recompute) == (4, "none") and not gpu:
            # Would be recommended if it had no warning.
            found["warnings"] = ["54 % of the time is spent on denormal numbers"]
            found["samples_per_s"] *= 3
        writer.run(case, found, utilisation=use, predicted=predicted)
    if torn:
        # A duplicate of the case: the last one counts.
        first_case = {"model": "cnn-basic", "image_size": 112, "batch": 4,
                      "accumulate": 1, "optimizer": "sgd", "recompute": "none",
                      "norm": "batch", "seconds": 20}
        parts = {"parameters": 538_688, "gradients": 534_600, "optimizer": 0,
                 "activations": 5_000_000, "workspace": 4_000_000,
                 "data": 200_704}
        writer.run(first_case, figures("cnn-basic", device, "sgd", "none", 4, 1,
                                       0.31, parts, 6_300_000,
                                       ("backward", "block1")))
        writer.torn()
    writer.close()


def checkpoints(folder, device, points, seed):
    writer = Writer(folder, device, points, seed)
    published = {  # strategy: published kept memory, time and peak
        "none": (1, 1, 3.3e9, 38), "checkpoints:0": (0.003, 3.65, 465e6, 139),
        "checkpoints:2": (0.086, 2.55, 578e6, 97),
        "checkpoints:4": (0.147, 2.00, 759e6, 76),
        "checkpoints:8": (0.326, 1.82, 1.3e9, 69),
        "checkpoints:16": (0.60, 1.74, 2.1e9, 66)}
    rows = [{"case": {"recompute": name}, "label": name, "kept_ratio": kept,
             "time_ratio": ratio, "time_s": seconds, "kept_bytes":
             int(kept * 2910 * MIB)}
            for name, (kept, ratio, _, seconds) in published.items()]
    writer.study("checkpoints", "How many checkpoints",
                 "What does each number of checkpoints keep, and what does it "
                 "cost?", ["checkpoints"], 14,
                 {"source": "TF2 on a CPU, 26 layers", "rows": rows})
    ours = {"none": (1, 1, 1), "checkpoints:0": (0.004, 0.31, 1.34),
            "checkpoints:2": (0.09, 0.36, 1.32),
            "checkpoints:4": (0.15, 0.41, 1.31),
            "checkpoints:8": (0.33, 0.55, 1.24),
            "checkpoints:16": (0.61, 0.78, 1.13),
            "sqrt": (0.19, 0.43, 1.29)}
    for repeat in (1, 2):
        for name, (kept, peak, time) in ours.items():
            case = {"model": "cnn-profile", "image_size": 256, "batch": 16,
                    "optimizer": "sgd", "recompute": name}
            whole = 3_900 * MIB * peak
            parts = {"parameters": 1_200_000, "gradients": 1_200_000,
                     "optimizer": 0, "activations": int(whole * 0.7),
                     "workspace": int(whole * 0.28), "data": 4_194_304}
            ms = 210 * time * writer.noise(0.03)
            stage = "conv4" if name == "none" else "conv3"
            writer.run(case, figures("cnn-profile", device, "sgd", name, 16, 1,
                                     ms, parts, int(2910 * MIB * kept),
                                     ("backward", stage)),
                       utilisation=88, repeat=repeat)
    writer.close()


def ranks(folder, device, points, seed):
    writer = Writer(folder, device, points, seed)
    writer.study("ranks", "What ranks divide", "What does each rank need?", ["ranks"], 18)
    cases = [(1, None)] + [(n, level) for n in (2, 4) for level in
                           ("none", "optimizer", "gradients", "parameters")]
    for n, level in cases:
        for budget in ("120MiB", "400MiB"):
            case = {"model": "gpt2", "seq": 64, "optimizer": "adamw", "memory": budget}
            if level:
                case |= {"ranks": n, "shard": level}
            whole = 14 * MIB
            parts = {"parameters": whole // (n if level == "parameters" else 1),
                     "gradients": 0, "optimizer": 2 * whole // (n if level not in
                                                               (None, "none") else 1),
                     "activations": (40 if budget == "120MiB" else 60) * MIB,
                     "workspace": 8 * MIB, "data": 8192}
            ms = 400 / n * writer.noise(0.1)
            found = figures("gpt2", device, "adamw", "optimal", 16 // n, 1, ms, parts,
                            int(40 * MIB), ("backward", "head"))
            found["ranks"] = n
            found["predicted"] = {"peak_bytes": int(sum(parts.values()) * 1.01),
                                  "step_ms": 390 / n}
            if level:
                found |= {"reduce_bytes": whole * 8, "gather_bytes": whole * 12, "steps": 8}
            writer.run(case, found, utilisation=90)
    writer.close()


def steps(folder, device, points, seed):
    writer = Writer(folder, device, points, seed)
    rows = [  # label, micro, accumulate, recompute, precision, optimizer, s, MB
        ("batch 4", 4, 1, "none", "fp32", "adamw", 57.82, 14949),
        ("batch 1 × 4", 1, 4, "none", "fp32", "adamw", 66.03, 8681),
        ("+ checkpointing", 1, 4, "sqrt", "fp32", "adamw", 85.47, 6775),
        ("fp16 only", 4, 1, "none", "fp16", "adamw", 27.46, 13939),
        ("Adafactor only", 4, 1, "none", "fp32", "adafactor", 64.31, 12295),
        ("8-bit Adam only", 4, 1, "none", "fp32", "adam8bit", 55.95, 13085),
        ("accumulation + checkpointing + fp16", 1, 4, "sqrt", "fp16", "adamw",
         50.76, 7275),
        ("the same with Adafactor", 1, 4, "sqrt", "fp16", "adafactor", 56.54,
         4847),
        ("the same with 8-bit Adam", 1, 4, "sqrt", "fp16", "adam8bit", 49.46,
         5363)]

    def case_of(row):
        return {"model": "bert-large", "seq": 512, "batch": row[1],
                "accumulate": row[2], "recompute": row[3], "precision": row[4],
                "optimizer": row[5]}

    writer.study("steps", "One step at a time",
                 "What does each measure buy for BERT-large?", ["steps"],
                 2 * len(rows),
                 {"source": "published by Hugging Face, on a V100 with 16 GB (the whole device's memory)", "rows": [
                     {"case": case_of(row) if row[1] == 4 else {},
                      "label": row[0], "time_s": row[6],
                      "samples_per_s": round(512 / row[6], 2),
                      "peak_bytes": row[7] * 1_000_000} for row in rows]})
    writer.run(case_of(rows[0]) | {"precision": "bf16"}, status="oom",
               label="bf16, batch 4", reason="out of memory")
    for system, memory, speed in (("reprise", 0.86, 6.1), ("transformers", 0.97, 5.2)):
        for row in rows:
            if system == "transformers" and row[5] == "adam8bit":
                writer.run(case_of(row), status="failed", label=row[0],
                           system=system, reason="bitsandbytes is not installed")
                continue
            peak = row[7] * 1e6 * memory * writer.noise(0.03)
            parts = {"parameters": 1_340_000_000, "gradients": 1_340_000_000,
                     "optimizer": {"adamw": 2_680_000_000, "adafactor": 4_000_000,
                                   "adam8bit": 680_000_000}[row[5]]}
            rest = max(4e8, peak - sum(parts.values()))
            parts |= {"activations": int(rest * 0.8), "workspace": int(rest * 0.2),
                      "data": 16_384}
            ms = row[6] / speed / 512 * 1000 * writer.noise(0.02)
            record = figures("bert-large", device, row[5], row[3], row[1], row[2],
                             ms, parts, int(rest * (0.12 if row[3] == "sqrt"
                                                    else 0.75)),
                             ("update", "") if row[1] == 1 else
                             ("backward", "layer.23"), samples=512,
                             precision=row[4], parameters=335_143_938,
                             time_s=ms * 512 / 1000)
            if system != "reprise":
                # The figures of other systems have no categories.
                record["memory"] = record["peak_at"] = None
                record["kept_bytes"] = None
            writer.run(case_of(row), record, label=row[0], system=system,
                       utilisation=80 if row[1] == 4 else 55)
            if row[0] in ("batch 4", "8-bit Adam only") and system == "reprise":
                slower = record | {key: record[key] * 1.05 for key in ("epoch_s", "time_s")}
                writer.run(case_of(row), slower, label=row[0], system=system, repeat=2)
    writer.close()


def frontier(folder, device, points, seed):
    writer = Writer(folder, device, points, seed)
    writer.study("frontier", "Time against memory",
                 "What does a smaller budget cost?", ["frontier"], 40)
    for model, whole, ms in (("resnet50", 9_000 * MIB, 4.0),
                             ("gpt2-small", 14_000 * MIB, 9.0)):
        axes = {"model": model, "optimizer": "adamw", "precision": "bf16",
                "global_batch": 32}
        axes |= {"image_size": 224} if model == "resnet50" else {"seq": 1024}

        def parts_of(part, whole=whole):
            fixed = int(whole * 0.12)
            rest = whole * part - fixed
            return {"parameters": fixed // 4, "gradients": fixed // 4,
                    "optimizer": fixed // 2, "activations": int(rest * 0.85),
                    "workspace": int(rest * 0.14), "data": int(rest * 0.01)}

        for name, part, time in (("none", 1, 1), ("sqrt", 0.42, 1.27),
                                 ("every:2", 0.62, 1.15), ("every:4", 0.5, 1.24),
                                 ("all", 0.35, 1.33), ("revolve:3", 0.3, 1.9)):
            writer.run(axes | {"batch": 32, "recompute": name},
                       figures(model, device, "adamw", name, 32, 1,
                               ms * time * writer.noise(0.02), parts_of(part),
                               int(whole * part * 0.6),
                               ("backward", "layer2.0" if part < 1 else "fc")),
                       utilisation=90)
        for micro in (16, 8, 4, 2):
            part = 0.14 + 0.86 * micro / 32
            writer.run(axes | {"batch": micro, "recompute": "none"},
                       figures(model, device, "adamw", "none", micro, 32 // micro,
                               ms * (0.97 + 0.9 / micro) * writer.noise(0.02),
                               parts_of(part), int(whole * part * 0.6),
                               ("backward", "fc")), utilisation=70)
        for gib in (1, 2, 3, 4, 6, 8, 12):
            part = gib * 1024 * MIB / whole
            if part < 0.2:
                writer.run(axes | {"memory": f"{gib}GiB"}, status="failed",
                           reason=f"no plan fits into {gib}.00 GiB: at least "
                           f"{0.2 * whole / 1024 / MIB:.2f} GiB are needed")
                continue
            part = min(1, part * 0.985)
            micro = 32 if part > 0.4 else 8
            writer.run(axes | {"memory": f"{gib}GiB"},
                       figures(model, device, "adamw", "optimal", micro,
                               32 // micro, ms * (0.96 + 0.11 / part)
                               * writer.noise(0.01), parts_of(part),
                               int(whole * part * 0.5), ("backward", "layer1.0")),
                       predicted={"peak_bytes": int(part * whole * 0.99),
                                  "step_ms": 32 * ms}, utilisation=86)
    writer.close()


def deep(folder, device, points, seed):
    """A chain of equal stages, in which recomputation lowers the peak."""
    writer = Writer(folder, device, points, seed)
    writer.study("deep", "A deep MLP", "Where all stages are alike, how far does "
                 "the peak fall?", ["grid", "frontier"], 48)
    # Another model, whose size is given by another axis.
    for side in (56, 112):
        for name in ("none", "all"):
            parts = {"parameters": 500_000, "gradients": 500_000, "optimizer": 0,
                     "activations": 700 * side * side, "workspace": 900_000,
                     "data": 8 * side * side}
            # Three repeats of the same speed, so that differences are noise.
            for repeat in (1, 2, 3):
                writer.run({"model": "cnn-basic", "image_size": side, "batch": 8,
                            "lr": 0.001, "optimizer": "sgd", "recompute": name},
                           figures("cnn-basic", device, "sgd", name, 8, 1,
                                   2.5 * (1 + 0.02 * repeat) + (name == "all") * 0.04,
                                   parts | {"activations": parts["activations"] //
                                            (2 if name == "all" and side > 56 else 1)},
                                   300 * side * side if name == "none" else 0,
                                   ("backward", "block1")), with_series=False,
                           repeat=repeat)
    for depth in (16, 64, 256):
        for batch in (64, 256):
            for accumulate in (1, 4):
                for name in ("none", "sqrt"):
                    stage = 4096 * 4 * batch
                    n = depth if name == "none" else 2 * math.isqrt(depth)
                    parts = {"parameters": depth * 4_200_000,
                             "gradients": depth * 4_200_000, "optimizer": 0,
                             "activations": 2 * n * stage, "workspace": 3 * stage,
                             "data": batch * 4096}
                    time = 0.002 * depth * (1 if name == "none" else 1.31)
                    writer.run({"model": "mlp", "depth": depth, "batch": batch,
                                "accumulate": accumulate, "optimizer": "sgd",
                                "recompute": name},
                               figures("mlp", device, "sgd", name, batch,
                                       accumulate, time * writer.noise(0.03),
                                       parts, 2 * n * stage,
                                       ("backward", f"layer{depth - 1}")
                                       if name == "none" else
                                       ("recompute", f"layer{depth - 1}")),
                               utilisation=92, with_series=False)
    # Trained by several ranks.
    for ranks in (1, 2, 4):
        for name in ("none", "sqrt"):
            for accumulate in (1, 4):
                parts = {"parameters": 900_000, "gradients": 900_000,
                         "optimizer": 0, "activations": 4_000_000,
                         "workspace": 100_000, "data": 65536}
                found = figures("mlp", device, "sgd", name, 16, accumulate,
                                0.9 / ranks ** 0.8 * writer.noise(0.03), parts,
                                4_000_000 if name == "none" else 900_000,
                                ("backward", "layer3"))
                if ranks > 1:
                    found |= {"ranks": ranks, "global_batch": 16 * accumulate * ranks,
                              "reduce_calls": 40,
                              "reduce_bytes": 36_000_000, "reduce_s": 0.4,
                              "reduce_wait_s": 0.1}
                writer.run({"model": "mlp", "depth": 4, "batch": 16,
                            "accumulate": accumulate, "ranks": ranks,
                            "optimizer": "sgd", "recompute": name}, found,
                           with_series=False)
    writer.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--series", type=int, default=60)
    parser.add_argument("--size", choices=("quick", "full"), default="quick")
    args = parser.parse_args()
    mnist(args.out / "mnist-gpu", GPU, args.series, args.size, 1, True)
    mnist(args.out / "mnist-cpu", CPU, args.series, args.size, 2, False)
    checkpoints(args.out / "checkpoints", CPU, args.series, 3)
    steps(args.out / "steps", GPU, args.series, 4)
    frontier(args.out / "frontier", GPU, args.series, 5)
    deep(args.out / "deep", CPU, args.series, 6)
    ranks(args.out / "ranks", CPU, args.series, 8)
    checkpoints(args.out / "checkpoints-again", CPU, args.series, 7)


if __name__ == "__main__":
    main()
