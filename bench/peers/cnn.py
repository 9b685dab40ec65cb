"""The zoo's small convolutional networks in plain PyTorch, on enlarged images; what
`bench/gpu.py` sets beside ours.

    python3 bench/peers/cnn.py data FOLDER --samples 64
    python3 bench/peers/cnn.py weights FILE --model cnn-blocks --size 112
    python3 bench/peers/cnn.py train --data FOLDER --weights FILE --model cnn-blocks \
        --size 112 --micro 1 --accumulate 64 --technique eager

Techniques: eager; checkpoint (two segments); compile; compile-graphs; graph. fp32,
Adam. Prints one line of JSON, as gpt2.py does: the losses of exact convolutions, the
times with TF32, as PyTorch has it by default.
"""
import argparse
import pathlib
import struct

import numpy
import torch
from torch import nn
from torch.nn import functional as F

from timing import Captured, print_measured

TECHNIQUES = ("eager", "checkpoint", "compile", "compile-graphs", "graph")
BASIC = [(8, 3584), (16, 1792), (24, 896), (32, 448), (40, 224), (48, 112), (56, 56),
         (64, 28), (72, 0), (80, 0), (88, 0), (96, 0)]


def named(**layers):
    block = nn.Sequential()
    for name, layer in layers.items():
        block.add_module(name, layer)
    return block


def make_model(name, size, norm):
    """Names of parameters are the zoo's."""
    model, channels = nn.Sequential(), 1
    if name == "cnn-blocks":
        for i, following in enumerate((16, 32, 64, 64, 64)):
            model.add_module(f"block{i}", named(
                conv=nn.Conv2d(channels, following, 3, padding=1),
                norm=nn.BatchNorm2d(following), relu=nn.ReLU(), pool=nn.MaxPool2d(2)))
            channels = following
        model.add_module("pool", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
        model.add_module("head", nn.Linear(channels, 10))
        return model
    first = [side for _, side in BASIC].index(size)
    for i, (following, _) in enumerate(BASIC[first:]):
        model.add_module(f"block{i}", named(
            conv=nn.Conv2d(channels, following, 2, stride=2, padding=int(following == 80)),
            norm=(nn.BatchNorm2d(following) if norm == "batch"
                  else nn.GroupNorm(following // 8, following)), relu=nn.ReLU()))
        channels = following
    model.add_module("flat", nn.Flatten())
    model.add_module("hidden", nn.Linear(channels, 32))
    model.add_module("relu", nn.ReLU())
    model.add_module("head", nn.Linear(32, 10))
    return model


def write_idx(path, array):
    with open(path, "wb") as file:
        file.write(struct.pack(">I", 0x800 + array.ndim))
        file.write(struct.pack(f">{array.ndim}I", *array.shape))
        file.write(array.tobytes())


def make_data(args):
    folder = pathlib.Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    random = numpy.random.default_rng(0)
    for part in ("train", "t10k"):
        write_idx(folder / f"{part}-images-idx3-ubyte",
                  random.integers(0, 256, (args.samples, 28, 28), dtype=numpy.uint8))
        write_idx(folder / f"{part}-labels-idx1-ubyte",
                  random.integers(0, 10, args.samples, dtype=numpy.uint8))


def read_data(folder, device):
    folder = pathlib.Path(folder)
    images = numpy.fromfile(folder / "train-images-idx3-ubyte", dtype=numpy.uint8)[16:]
    labels = numpy.fromfile(folder / "train-labels-idx1-ubyte", dtype=numpy.uint8)[8:]
    images = torch.from_numpy(images.reshape(-1, 1, 28, 28)).to(device).float() / 255
    return images, torch.from_numpy(labels.astype(numpy.int64)).to(device)


def make_weights(args):
    from safetensors.torch import save_file
    torch.manual_seed(0)
    state = make_model(args.model, args.size, args.norm).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in state.items()
               if not name.endswith("num_batches_tracked")}, args.file)


def train(args):
    from safetensors.torch import load_file
    device = torch.device(args.device)
    model = make_model(args.model, args.size, args.norm)
    model.load_state_dict(load_file(args.weights), strict=False)
    model.to(device).train()
    images, labels = read_data(args.data, device)
    mean, deviation = images.mean(), images.std(unbiased=False)
    window = args.micro * args.accumulate
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    stays = "graph" in args.technique  # the gradients, as in gpt2.py
    if args.technique == "compile-graphs":
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    call = run = None

    def micro_step(x, y):
        enlarged = F.interpolate(x, size=(args.size, args.size), mode="bilinear")
        loss = F.cross_entropy(call((enlarged - mean) / deviation), y, reduction="sum")
        (loss / window).backward()
        return loss.detach()

    def prepare(tf32):
        nonlocal call, run
        torch.backends.cudnn.allow_tf32 = tf32
        torch._dynamo.reset()  # a graph has the kernels of its making
        call, run = model, micro_step
        if args.technique == "checkpoint":
            from torch.utils.checkpoint import checkpoint_sequential
            call = lambda x: checkpoint_sequential(model, 2, x, use_reentrant=False)
        elif args.technique.startswith("compile"):
            call = torch.compile(model, mode="reduce-overhead"
                                 if args.technique == "compile-graphs" else None)
        if args.technique == "graph":
            run = Captured(micro_step, images[:args.micro], labels[:args.micro])
            optimizer.zero_grad(set_to_none=False)

    def update():
        total = torch.zeros((), device=device)
        for i in range(0, window, args.micro):
            if args.technique == "compile-graphs":
                torch.compiler.cudagraph_mark_step_begin()
            total += run(images[i:i + args.micro], labels[i:i + args.micro])
        optimizer.step()
        optimizer.zero_grad(set_to_none=not stays)
        return total / window

    print_measured(update, window, device, args, prepare)


def main():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    data = commands.add_parser("data")
    data.add_argument("folder")
    data.add_argument("--samples", type=int, default=64)
    weights = commands.add_parser("weights")
    weights.add_argument("file")
    training = commands.add_parser("train")
    training.add_argument("--data", required=True)
    training.add_argument("--weights", required=True)
    training.add_argument("--micro", type=int, default=1)
    training.add_argument("--accumulate", type=int, default=1)
    training.add_argument("--technique", choices=TECHNIQUES, default="eager")
    training.add_argument("--device", default="cuda")
    training.add_argument("--lr", type=float, default=1e-4)
    training.add_argument("--checked", type=int, default=4)
    training.add_argument("--timed", type=int, default=9)
    for command in (weights, training):
        command.add_argument("--model", choices=("cnn-basic", "cnn-blocks"),
                             default="cnn-blocks")
        command.add_argument("--size", type=int, default=112)
        command.add_argument("--norm", choices=("batch", "group"), default="batch",
                             help="of cnn-basic")
    args = parser.parse_args()
    {"data": make_data, "weights": make_weights, "train": train}[args.command](args)


if __name__ == "__main__":
    main()
