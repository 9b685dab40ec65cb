"""GPT-2 in plain PyTorch, trained by one memory technique; what `bench/gpu.py`
sets beside ours.

    python3 bench/peers/gpt2.py weights FILE --size gpt2
    python3 bench/peers/gpt2.py train --weights FILE --tokens FILE --size gpt2 \
        --micro 1 --accumulate 32 --technique eager

Techniques: eager; checkpoint (every block); selective (products and attention are
kept); compile; compile-budget (half of what compile keeps); compile-graphs
(reduce-overhead); checkpoint-compile (every block checkpointed, blocks and head compiled
each for itself, which takes seconds where the whole takes minutes); graph (the micro-step
as a CUDA graph, every block checkpointed with graph-checkpoint). bf16 by autocast, fused AdamW, no dropout. Prints one line of
JSON: losses of the updates, samples a second, peak of tensors.
"""
import argparse
import functools

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from timing import Captured, print_measured

SIZES = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16),
         "gpt2-large": (36, 1280, 20), "gpt2-xl": (48, 1600, 25)}
VOCABULARY, TOKENS = 50257, 1024
TECHNIQUES = ("eager", "checkpoint", "selective", "compile", "compile-budget",
              "compile-graphs", "checkpoint-compile", "graph", "graph-checkpoint")


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        n, t, c = x.shape
        parts = self.attend(self.before(x)).split(c, 2)
        q, k, v = (p.view(n, t, self.heads, c // self.heads).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(y.transpose(1, 2).reshape(n, t, c))
        return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))


def kept_products():
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
    aten = torch.ops.aten
    kept = {aten.mm.default, aten.addmm.default,
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_cudnn_attention.default}

    def policy(context, operator, *args, **kwargs):
        return (CheckpointPolicy.MUST_SAVE if operator in kept
                else CheckpointPolicy.PREFER_RECOMPUTE)
    return functools.partial(create_selective_checkpoint_contexts, policy)


class Gpt2(nn.Module):
    def __init__(self, size):
        super().__init__()
        depth, width, heads = SIZES[size]
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.run_block = lambda block, x: block(x)
        self.run_head = self.head

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.places.weight[:tokens.shape[1]]
        for block in self.blocks:
            x = self.run_block(block, x)
        return self.run_head(x, targets)

    def head(self, x, targets):
        scores = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten(),
                               reduction="sum")


def names(depth):
    """Ours → (Hugging Face's, whether the matrix is transposed)."""
    result = {"tokens.weight": ("transformer.wte.weight", False),
              "places.weight": ("transformer.wpe.weight", False),
              "norm.weight": ("transformer.ln_f.weight", False),
              "norm.bias": ("transformer.ln_f.bias", False)}
    layers = {"before": "ln_1", "attend": "attn.c_attn", "mix": "attn.c_proj",
              "between": "ln_2", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    for i in range(depth):
        for mine, theirs in layers.items():
            for kind in ("weight", "bias"):
                turned = kind == "weight" and not theirs.startswith("ln")
                result[f"blocks.{i}.{mine}.{kind}"] = (
                    f"transformer.h.{i}.{theirs}.{kind}", turned)
    return result


def make_weights(args):
    from safetensors.torch import save_file
    torch.manual_seed(0)
    # A GPU draws a billion values in no time.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Gpt2(args.size)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.02)
    state = model.state_dict()
    save_file({theirs: (state[mine].t() if turned else state[mine]).contiguous()
               for mine, (theirs, turned) in names(SIZES[args.size][0]).items()}, args.file)


def load_weights(model, size, path):
    from safetensors.torch import load_file
    kept = load_file(path, device=str(next(model.parameters()).device))
    model.load_state_dict({mine: kept[theirs].t() if turned else kept[theirs]
                           for mine, (theirs, turned) in names(SIZES[size][0]).items()})


def train(args):
    torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.device(args.device)
    with device:
        model = Gpt2(args.size)
    load_weights(model, args.size, args.weights)
    if args.technique == "checkpoint-compile":
        for block in model.blocks:
            block.compile()
        model.run_head = torch.compile(model.head)
    if "checkpoint" in args.technique:
        model.run_block = lambda block, x: checkpoint(block, x, use_reentrant=False)
    elif args.technique == "selective":
        model.run_block = lambda block, x: checkpoint(block, x, use_reentrant=False,
                                                      context_fn=kept_products())
    call = model
    if args.technique.startswith("compile"):
        if args.technique == "compile-budget":
            from torch._functorch import config
            config.activation_memory_budget = 0.5
        mode = "reduce-overhead" if args.technique == "compile-graphs" else None
        call = torch.compile(model, mode=mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01,
                                  **({"fused": True} if device.type == "cuda" else {}))
    window = args.micro * args.accumulate
    ids = torch.from_numpy(numpy.fromfile(args.tokens, dtype=numpy.uint16).astype(numpy.int64))
    tokens = ids[:window * TOKENS].view(window, TOKENS).to(device)
    targets = ids[1:window * TOKENS + 1].view(window, TOKENS).to(device)

    def micro_step(x, y):
        with torch.autocast(device.type, torch.bfloat16):
            loss = call(x, y)
        (loss / (window * TOKENS)).backward()
        return loss.detach()

    # Where a graph holds the gradients they must not be its own to write over.
    stays = "graph" in args.technique
    run = micro_step
    if args.technique == "compile-graphs":
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    elif stays:
        run = Captured(micro_step, tokens[:args.micro], targets[:args.micro])
        optimizer.zero_grad(set_to_none=False)

    def update():
        total = torch.zeros((), device=device)
        for i in range(0, window, args.micro):
            if args.technique == "compile-graphs":
                torch.compiler.cudagraph_mark_step_begin()
            total += run(tokens[i:i + args.micro], targets[i:i + args.micro])
        optimizer.step()
        optimizer.zero_grad(set_to_none=not stays)
        return total / (window * TOKENS)

    print_measured(update, window, device, args)


def main():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    weights = commands.add_parser("weights")
    weights.add_argument("file")
    training = commands.add_parser("train")
    training.add_argument("--weights", required=True)
    training.add_argument("--tokens", required=True)
    training.add_argument("--micro", type=int, default=1)
    training.add_argument("--accumulate", type=int, default=1)
    training.add_argument("--technique", choices=TECHNIQUES, default="eager")
    training.add_argument("--device", default="cuda")
    training.add_argument("--lr", type=float, default=1e-4)
    training.add_argument("--checked", type=int, default=4)
    training.add_argument("--timed", type=int, default=5)
    for command in (weights, training):
        command.add_argument("--size", choices=SIZES, default="gpt2")
    args = parser.parse_args()
    (make_weights if args.command == "weights" else train)(args)


if __name__ == "__main__":
    main()
