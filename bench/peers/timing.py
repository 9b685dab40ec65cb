"""Measurements that all techniques of twin.py share."""
import statistics
import time

import torch


class Captured:
    """Forward and backward of one micro-batch as a CUDA graph."""

    def __init__(self, step, inputs, targets):
        self.inputs = (inputs.clone(), targets.clone())
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = step(*self.inputs)

    def __call__(self, inputs, targets):
        self.inputs[0].copy_(inputs)
        self.inputs[1].copy_(targets)
        self.graph.replay()
        return self.loss


def measure(update, window, device, times):
    """Median speed of some updates, and the peak of live tensors meanwhile."""
    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize()

    wait()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        update()
        wait()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {"samples_per_s": window / statistics.median(seconds), "peak_bytes": peak}
