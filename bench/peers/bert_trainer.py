"""Hugging Face's Trainer on the settings of studies/bert.yaml, as results that
stand beside ours in the report.

    python3 bench/peers/bert_trainer.py DIR [--samples 512]
    python3 bench/peers/bert_trainer.py train --micro 1 --accumulate 4 --precision bf16 \
        --technique checkpoint

The first appends to DIR/results.jsonl; the second prints one line of JSON, for
bench/gpu.py, with the speed from the fifth update on. Techniques: trainer; checkpoint;
compile, of either. BERT-Large with fresh weights, 512 random sequences of
512 tokens, one epoch; with fewer samples the time of an epoch is by the speed. The
peak is that of PyTorch's allocator, as ours is.
"""
import argparse
import datetime
import gc
import hashlib
import json
import os
import pathlib
import platform
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch.utils.data import Dataset

SAMPLES, TOKENS = 512, 512
CASES = [
    # label, micro-batch, accumulation, checkpointing, precision, optimizer
    ("batch 4", 4, 1, False, "fp32", "adamw"),
    ("1 × 4", 1, 4, False, "fp32", "adamw"),
    ("1 × 4, recompute", 1, 4, True, "fp32", "adamw"),
    ("fp16 only", 4, 1, False, "fp16", "adamw"),
    ("Adafactor only", 4, 1, False, "fp32", "adafactor"),
    ("1 × 4, recompute, fp16", 1, 4, True, "fp16", "adamw"),
    ("1 × 4, recompute, fp16, Adafactor", 1, 4, True, "fp16", "adafactor"),
    ("bf16, batch 4", 4, 1, False, "bf16", "adamw"),
    ("bf16, 1 × 4", 1, 4, False, "bf16", "adamw"),
    ("bf16, 1 × 4, recompute", 1, 4, True, "bf16", "adamw"),
]


class RandomSequences(Dataset):
    def __init__(self, samples):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(100, 30000, (samples, TOKENS), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": torch.tensor(index % 2)}


class Stopwatch(transformers.TrainerCallback):
    """Of the updates after the first, which compile and warm up."""
    FIRST = 4

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.FIRST:
            torch.cuda.synchronize()
            self.start = time.perf_counter()

    def on_train_end(self, args, state, control, **_):
        torch.cuda.synchronize()
        self.seconds = time.perf_counter() - getattr(self, "start", 0)
        self.updates = state.global_step - self.FIRST


def train(samples, batch, accumulate, checkpointing, precision, optimizer, compiled=False,
          watch=None):
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    model = transformers.BertForSequenceClassification(config).cuda()
    arguments = transformers.TrainingArguments(
        output_dir="/tmp/bert_trainer",
        num_train_epochs=1,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulate,
        gradient_checkpointing=checkpointing,
        fp16=precision == "fp16",
        bf16=precision == "bf16",
        optim={"adamw": "adamw_torch_fused", "adafactor": "adafactor"}[optimizer],
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        torch_compile=compiled,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=RandomSequences(samples),
                                   callbacks=[watch] if watch else None)
    torch.cuda.reset_peak_memory_stats()
    metrics = trainer.train().metrics
    return {
        "model": "bert-large",
        "parameters": sum(p.numel() for p in model.parameters()),
        "data": "random",
        "device": "cuda",
        "precision": precision,
        "optimizer": optimizer,
        "recompute": "all" if checkpointing else "none",
        "micro_batch": batch,
        "accumulate": accumulate,
        "global_batch": batch * accumulate,
        "steps": samples // (batch * accumulate),
        "time_s": metrics["train_runtime"],
        "samples_per_s": metrics["train_samples_per_second"],
        "step_ms": 1000 * metrics["train_runtime"] * batch * accumulate / samples,
        "epoch_s": metrics["train_runtime"] * SAMPLES / samples,
        "data_samples": SAMPLES,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "loss": metrics["train_loss"],
    }


def record(label, case, figures, started, wall_s):
    device = torch.cuda.get_device_properties(0)
    key = json.dumps([case, "transformers", device.name], sort_keys=True)
    return {
        "type": "run",
        "id": hashlib.sha256(key.encode()).hexdigest()[:16],
        "study": "bert",
        "system": "transformers",
        "case": case,
        "label": label,
        "repeat": 1,
        "status": "done",
        "reason": None,
        "predicted": None,
        "figures": figures,
        "observed": None,
        "series": None,
        "device": {"name": device.name, "kind": "cuda", "memory_bytes": device.total_memory,
                   "cores": None, "driver": None},
        "versions": {"transformers": transformers.__version__, "libtorch": torch.__version__},
        "host": platform.node(),
        "command": "python3 bench/peers/bert_trainer.py",
        "started": started,
        "wall_s": round(wall_s, 3),
    }


def one_case(words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--technique", default="trainer",
                        choices=("trainer", "checkpoint", "compile", "checkpoint-compile"))
    arguments = parser.parse_args(words)
    watch = Stopwatch()
    figures = train(28 * arguments.micro * arguments.accumulate, arguments.micro,
                    arguments.accumulate, "checkpoint" in arguments.technique,
                    arguments.precision, "adamw", "compile" in arguments.technique, watch)
    speed = watch.updates * figures["global_batch"] / watch.seconds
    print(json.dumps({"losses": [], "samples_per_s": speed,
                      "peak_bytes": figures["peak_bytes"]}), flush=True)


def main():
    if sys.argv[1:2] == ["train"]:
        one_case(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    arguments = parser.parse_args()
    directory = arguments.directory
    directory.mkdir(parents=True, exist_ok=True)
    train(64, 4, 1, False, "fp32", "adamw")  # warms up: libraries, clocks
    with open(directory / "results.jsonl", "a") as results:
        for label, batch, accumulate, checkpointing, precision, optimizer in CASES:
            case = {
                "model": "bert-large", "seq": TOKENS, "data": "random",
                "random_samples": SAMPLES, "epochs": 1, "optimizer": optimizer,
                "batch": batch, "accumulate": accumulate, "precision": precision,
                "recompute": "all" if checkpointing else "none",
            }
            started = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
            begin = time.monotonic()
            figures = train(arguments.samples, batch, accumulate, checkpointing, precision, optimizer)
            line = record(label, case, figures, started, time.monotonic() - begin)
            results.write(json.dumps(line, ensure_ascii=False) + "\n")
            results.flush()
            print(f"{label:36} {figures['samples_per_s']:8.2f} samples/s "
                  f"{figures['peak_bytes'] / 2**20:8.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
