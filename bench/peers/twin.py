"""The PyTorch twin of a model of the zoo, trained with one memory technique, for bench/gpu.py.

    python3 bench/peers/twin.py weights FILE --model gpt2
    python3 bench/peers/twin.py count --model gpt2
    python3 bench/peers/twin.py train --weights FILE --model gpt2 --micro 1 --accumulate 32 \
        --technique eager

The first writes random weights, which the command reads as well; the second prints what
floor.py counts. The third trains on the samples of `--data random`, which are the same as
those of the command, and prints one line of JSON: the losses of the first updates, samples
per second, and the peak of live tensors.

Techniques: eager; checkpoint (every block); selective (checkpoints that keep GEMMs and
attention); compile; compile-budget:B (B is the share of the activations that the compiler
may keep, 0.5 by default); compile-graphs (reduce-overhead); compile-checkpoint (checkpoints in
what is compiled); checkpoint-compile (every block compiled by itself and checkpointed, which
compiles faster); graph (the micro-step as a CUDA graph); graph-checkpoint (the same with every
block checkpointed).

Precision is by autocast. Convolutional networks have channels last. bf16 runs may use TF32
for the rest, fp32 runs with --tf32. Losses are compared without dropout and, for fp32,
without TF32, times are measured with.
"""
import argparse
import functools
import gc
import json

import samples
import torch
import twins
import zoo
from torch import nn
from timing import Captured, measure

TECHNIQUES = ("eager", "checkpoint", "selective", "compile", "compile-budget",
              "compile-graphs", "compile-checkpoint", "checkpoint-compile", "graph",
              "graph-checkpoint")


def keep_products():
    """Context of a checkpoint that keeps GEMMs, convolutions and attention."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
    aten = torch.ops.aten
    names = ("mm", "addmm", "convolution", "_scaled_dot_product_flash_attention",
             "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention")
    kept = {getattr(aten, name).default for name in names if hasattr(aten, name)}

    def policy(context, operator, *args, **kwargs):
        return (CheckpointPolicy.MUST_SAVE if operator in kept
                else CheckpointPolicy.PREFER_RECOMPUTE)
    return functools.partial(create_selective_checkpoint_contexts, policy)


class Checkpointed(nn.Module):
    """A block that is recomputed in the backward."""

    def __init__(self, inner, **options):
        super().__init__()
        self.inner, self.options = inner, options
        # Models read attributes of their blocks.
        for key, value in vars(inner).items():
            if not key.startswith("_") and key != "training":
                self.__dict__[key] = value

    def forward(self, *args, **kwargs):
        from torch.utils.checkpoint import checkpoint
        return checkpoint(self.inner, *args, use_reentrant=False, **self.options, **kwargs)


def parse_technique(text):
    """Name and budget."""
    name, _, budget = text.partition(":")
    if name not in TECHNIQUES or (budget and name != "compile-budget"):
        raise SystemExit(f"expected a technique of {', '.join(TECHNIQUES)}, or "
                         f"compile-budget:SHARE; got {text}")
    return name, float(budget or 0.5)


def apply_technique(name, twin, text):
    """Returns the function to call in the place of the twin."""
    technique, budget = parse_technique(text)
    if "checkpoint" in technique or technique == "selective":
        options = {"context_fn": keep_products()} if technique == "selective" else {}
        for parent, key in twins.blocks_of(name, twin):
            block = getattr(parent, key)
            if technique == "checkpoint-compile":
                block.compile()
            setattr(parent, key, Checkpointed(block, **options))
        if technique == "checkpoint-compile" and hasattr(twin, "compile_rest"):
            twin.compile_rest()
    if not technique.startswith("compile"):
        return twin
    if technique == "compile-budget":
        from torch._functorch import config
        config.activation_memory_budget = budget
    return torch.compile(twin,
                         mode="reduce-overhead" if technique == "compile-graphs" else None)


class Training:
    """The twin with an optimizer, and its updates."""

    def __init__(self, args, options, dropout, tf32):
        self.args, self.device = args, torch.device(args.device)
        self.window = args.micro * args.accumulate
        spec = zoo.MODELS[args.model]
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = tf32
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        if self.device.type == "cuda":
            torch._dynamo.reset()  # compiled code depends on these settings
        twin = make_on(self.device, args.model, options, dropout)
        twins.load_weights(args.model, twin, args.weights)
        x, y = (t.to(self.device) for t in twins.make_batch(args.model, options, self.window))
        if spec.convolutional:
            twin.to(memory_format=torch.channels_last)
            x = x.to(memory_format=torch.channels_last)
        self.x, self.y = x, y
        # Sum of the losses of a window is divided by this.
        self.count = self.window * (options["seq"] if spec.task == "language" else 1)
        self.call = apply_technique(args.model, twin, args.technique)
        fused = {"fused": True} if self.device.type == "cuda" else {}
        self.optimizer = torch.optim.AdamW(twin.parameters(), lr=args.lr,
                                           weight_decay=args.weight_decay, **fused)
        self.marks = args.technique == "compile-graphs"
        # The gradients that a graph adds to must stay where they are.
        self.stays = "graph" in args.technique
        self.run = self.micro_step
        if self.marks:
            for parameter in twin.parameters():
                parameter.grad = torch.zeros_like(parameter)
        elif self.stays:
            self.run = Captured(self.micro_step, x[:args.micro], y[:args.micro])
            self.optimizer.zero_grad(set_to_none=False)

    def micro_step(self, x, y):
        with torch.autocast(self.device.type, torch.bfloat16,
                            enabled=self.args.precision == "bf16"):
            loss = self.call(x, y)
        (loss / self.count).backward()
        return loss.detach()

    def update(self, epoch=None):
        """One update with all samples; with `epoch`, in the order of the command's."""
        micro, total = self.args.micro, torch.zeros((), device=self.device)
        order = None
        if epoch is not None and self.args.accumulate > 1:
            order = torch.tensor(samples.order(self.window, epoch), device=self.device)
        for i in range(0, self.window, micro):
            part = slice(i, i + micro) if order is None else order[i:i + micro]
            if self.marks:
                torch.compiler.cudagraph_mark_step_begin()
            total += self.run(self.x[part], self.y[part])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.stays)
        return total / self.count


def train(args, options):
    dropout = zoo.MODELS[args.model].dropout if args.dropout is None else args.dropout
    tf32 = args.precision == "bf16" or args.tf32
    exact_tf32 = args.precision == "bf16"
    training = Training(args, options, 0.0, exact_tf32)
    losses = [float(training.update(epoch)) for epoch in range(args.checked)]
    if dropout > 0 or tf32 != exact_tf32:
        del training
        gc.collect()
        training = Training(args, options, dropout, tf32)
        for _ in range(2):
            training.update()
    print(json.dumps({"losses": losses, **measure(training.update, training.window,
                                                  training.device, args.timed)}), flush=True)


def make_on(device, name, options, dropout=0.0):
    """The twin, in training mode. A GPU draws a billion weights in no time."""
    # PyTorch 1 has no default device.
    with device if hasattr(torch, "compile") else torch.no_grad():
        twin = twins.make_twin(name, options, dropout)
    return twin.to(device).requires_grad_().train()


def make_weights(args, options):
    torch.manual_seed(0)
    twin = make_on(torch.device(args.device), args.model, options)
    twins.save_weights(args.model, twin, args.file)


def print_count(args, options):
    from floor import count
    device = torch.device(args.device)
    twin = make_on(device, args.model, options)
    x, y = (t.to(device) for t in twins.make_batch(args.model, options, 2))
    print(json.dumps(count(twin, x, y)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    weights = commands.add_parser("weights")
    weights.add_argument("file")
    counting = commands.add_parser("count")
    training = commands.add_parser("train")
    training.add_argument("--weights", required=True)
    training.add_argument("--micro", type=int, default=1)
    training.add_argument("--accumulate", type=int, default=1)
    training.add_argument("--technique", default="eager")
    training.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    training.add_argument("--tf32", action="store_true")
    training.add_argument("--dropout", type=float)
    training.add_argument("--lr", type=float, default=1e-4)
    training.add_argument("--weight-decay", type=float, default=0.01)
    training.add_argument("--checked", type=int, default=4)
    training.add_argument("--timed", type=int, default=7)
    for command in (weights, counting, training):
        command.add_argument("--model", choices=zoo.MODELS, required=True)
        command.add_argument("--device", default="cuda")
        zoo.add_model_arguments(command)
    args = parser.parse_args()
    options = zoo.resolve(args.model, zoo.given_options(args))
    {"weights": make_weights, "count": print_count, "train": train}[args.command](args,
                                                                                 options)


if __name__ == "__main__":
    main()
