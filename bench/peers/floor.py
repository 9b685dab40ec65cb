"""Arithmetic and memory traffic that a training step cannot do without, counted in a twin.

One forward of the twin is watched. Each GEMM, convolution and attention becomes one pass in
the forward and one per gradient in the backward, and each batch norm two passes over its
input and one over its gradient. A pass reads its inputs and writes its result, as a kernel
of its own does; everything else counts as fused into these passes.
"""
import collections

import torch
from torch.overrides import TorchFunctionMode

GEMMS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "addmm", "baddbmm"}
CONVOLUTIONS = {"conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d"}


class Watch(TorchFunctionMode):
    """Passes as (flops, values of activations, values of weights, whether forward)."""

    def __init__(self):
        super().__init__()
        self.passes = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        args = (*args, *kwargs.values())  # in the order of the parameters, as layers pass them
        if name == "linear":
            self.product(args[0], args[1], result, 2 * args[0].numel() * args[1].shape[0])
        elif name in CONVOLUTIONS:
            values = args[0] if "transpose" in name else result
            self.product(args[0], args[1], result, 2 * values.numel() * args[1][0].numel())
        elif name in GEMMS:
            a, b = args[-2:] if name in ("addmm", "baddbmm") else args[:2]
            self.product(a, b, result, 2 * result.numel() * a.shape[-1])
        elif name == "scaled_dot_product_attention":
            self.attention(*args[:3], kwargs.get("is_causal", False))
        elif name == "multi_head_attention_forward":
            self.multi_head(args[0], args[3], args[5], args[11])
        elif name in ("lstm", "gru") and isinstance(args[2], (list, tuple)):
            self.recurrent(args[2], result[0])
        elif name == "batch_norm":
            self.passes += [(0, args[0].numel(), 0, True), (0, 2 * args[0].numel(), 0, False)]
        return result

    def product(self, x, weight, result, flops):
        of_weight = isinstance(weight, torch.nn.Parameter)
        values = x.numel() + result.numel() + (0 if of_weight else weight.numel())
        held = weight.numel() if of_weight else 0
        self.passes.append((flops, values, held, True))
        self.passes += [(flops, values, held, False)] * (int(x.requires_grad) +
                                                         int(weight.requires_grad))

    def attention(self, q, k, v, causal):
        flops = 4 * q.numel() * k.shape[-2] * (0.5 if causal else 1)
        values = 2 * q.numel() + k.numel() + v.numel()
        self.passes += [(flops, values, 0, True), (2 * flops, 2 * values, 0, False)]

    def multi_head(self, q, width, weight, out):
        rows = q.numel() // width
        for of, columns in ((weight, 3 * width), (out, width)):
            flops = 2 * rows * width * columns
            one = (flops, rows * (width + columns), of.numel())
            self.passes += [(*one, True), (*one, False), (*one, False)]
        samples = q.shape[1]
        heads = torch.empty(samples, rows // samples, width, device="meta")
        self.attention(heads, heads, heads, False)

    def recurrent(self, weights, result):
        rows = result.numel() // result.shape[-1]
        for weight in weights:
            if weight.dim() == 2:
                one = (2 * rows * weight.numel(), rows * sum(weight.shape), weight.numel())
                self.passes += [(*one, True), (*one, False), (*one, False)]


def count(twin, x, y):
    """The passes of one sample, each [flops, activations, weights, forward, times], and the
    number of parameters. `x` and `y` have at least two samples, for the sake of norms."""
    watch = Watch()
    with watch:
        twin(x, y)
    samples = len(x)
    passes = collections.Counter(
        (flops / samples, values / samples, held, forward)
        for flops, values, held, forward in watch.passes)
    parameters = sum(p.numel() for p in twin.parameters() if p.requires_grad)
    return {"passes": [[*key, times] for key, times in passes.items()],
            "parameters": parameters}
