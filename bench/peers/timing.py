"""What the peers of bench/gpu.py measure alike."""
import json
import statistics
import time

import torch


class Captured:
    """Forward and backward of one micro-batch as a CUDA graph."""

    def __init__(self, step, tokens, targets):
        self.inputs = (tokens.clone(), targets.clone())
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = step(*self.inputs)

    def __call__(self, tokens, targets):
        self.inputs[0].copy_(tokens)
        self.inputs[1].copy_(targets)
        self.graph.replay()
        return self.loss


def print_measured(update, window, device, args, prepare=None):
    """The losses of the first updates, then the median speed of some more and the peak of
    tensors meanwhile, as one line of JSON. `prepare` makes the step, of exact products for
    the losses and of TF32's, with two updates that are not counted, for the times."""
    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize()

    if prepare:
        prepare(False)
    losses = [update() for _ in range(args.checked)]
    if prepare:
        prepare(True)
        for _ in range(2):
            update()
    wait()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(args.timed):
        start = time.perf_counter()
        update()
        wait()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    print(json.dumps({"losses": [float(loss) for loss in losses],
                      "samples_per_s": window / statistics.median(times),
                      "peak_bytes": peak}), flush=True)
