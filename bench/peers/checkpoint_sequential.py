"""PyTorch's checkpoint_sequential against a plan at the same memory, on CUDA.

For every number of segments: peak memory and samples a second of torchvision's
model, cut into the same stages as ours. Then `reprise plan --measure` gets that
peak as its budget, on the same machine in the same run. By default both compute in the
fp32 of their own defaults, which with PyTorch means TF32 in convolutions; --tf32 both and
--tf32 neither compare like with like.

    python3 bench/peers/checkpoint_sequential.py REPRISE [--model resnet101]
"""
import argparse
import gc
import json
import statistics
import subprocess
import time

import torch
import torchvision
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential


def stages_of(name, classes=1000):
    """The model as a list of blocks, as the zoo has it."""
    model = getattr(torchvision.models, name)(weights=None, num_classes=classes)
    if name.startswith("resnet"):
        stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
        blocks = [b for i in range(1, 5) for b in getattr(model, f"layer{i}")]
        head = nn.Sequential(model.avgpool, nn.Flatten(1), model.fc)
        return [stem, *blocks, head]
    blocks, block = [], []
    for layer in model.features:  # a convolution and what follows it
        if isinstance(layer, nn.Conv2d) and block:
            blocks.append(nn.Sequential(*block))
            block = []
        block.append(layer)
    blocks.append(nn.Sequential(*block))
    for layer in (nn.Sequential(model.avgpool, nn.Flatten(1)), model.classifier):
        blocks.append(layer)
    return blocks


def measure(name, batch, segments, steps):
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = nn.Sequential(*stages_of(name)).cuda().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(batch, 3, 224, 224, device="cuda")
    y = torch.randint(1000, (batch,), device="cuda")

    def step():
        if segments == 0:
            out = model(x)
        else:
            out = checkpoint_sequential(model, segments, x, use_reentrant=False)
        nn.functional.cross_entropy(out, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / steps)
    return torch.cuda.max_memory_allocated(), batch / statistics.median(times)


def ours(arguments, memory):
    command = [arguments.reprise, "plan", "--model", arguments.model, "--device", "cuda"]
    command += ["--batch", str(arguments.batch), "--global-batch", str(arguments.batch)]
    command += ["--optimizer", "sgd", "--precision", "fp32", "--memory", str(memory), "--measure", "--format", "json"]
    if arguments.tf32 == "both":
        command.append("--tf32")
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode != 0:
        return None
    plan = json.loads(answer.stdout)
    measured = plan["measured"]
    return measured["peak_bytes"], arguments.batch / measured["step_ms"] * 1000, plan


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("reprise", help="the command")
    parser.add_argument("--model", default="resnet101")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--segments", type=int, nargs="*", default=[2, 3, 4, 5, 6, 8, 10])
    parser.add_argument("--tf32", choices=["default", "both", "neither"], default="default")
    arguments = parser.parse_args()
    if arguments.tf32 != "default":
        torch.backends.cudnn.allow_tf32 = arguments.tf32 == "both"
        torch.backends.cuda.matmul.allow_tf32 = arguments.tf32 == "both"
    print(f"{arguments.model}, batch {arguments.batch}, {torch.cuda.get_device_name()}, "
          f"TF32: {arguments.tf32}; memory is the caching allocator's peak")
    print(f"{'segments':>8} {'PyTorch':>10} {'samples/s':>10} | {'Reprise':>10} {'samples/s':>10} {'ratio':>6}")
    rows = []
    for segments in [0, *arguments.segments]:
        peak, speed = measure(arguments.model, arguments.batch, segments, arguments.steps)
        gc.collect()
        torch.cuda.empty_cache()
        plan = ours(arguments, peak)
        text = f"{segments or 'none':>8} {peak / 2**30:>6.2f} GiB {speed:>10.1f} | "
        if plan is None:
            text += "nothing fits"
        else:
            text += f"{plan[0] / 2**30:>6.2f} GiB {plan[1]:>10.1f} {plan[1] / speed:>6.3f}"
            rows.append((segments, peak, speed, plan[0], plan[1]))
        print(text, flush=True)
    cut = [row for row in rows if row[0] > 0]
    if cut:
        fastest = max(cut, key=lambda row: row[2])
        smallest = min(cut, key=lambda row: row[1])
        for what, row in (("fastest", fastest), ("smallest", smallest)):
            print(f"at its {what} ({row[0]} segments): {row[4] / row[2]:.3f} times its samples/s")


if __name__ == "__main__":
    main()
