"""What this device gives at most: a large product in bf16 and in TF32, a large copy."""
import json

import torch


def best_seconds(work, times=20):
    for _ in range(3):
        work()
    best = float("inf")
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best


def main():
    torch.backends.cuda.matmul.allow_tf32 = True

    def product(dtype, n=8192):
        a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
        return 2 * n**3 / best_seconds(lambda: a @ b)
    source = torch.empty(2**30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    rate = 2 * source.nbytes / best_seconds(lambda: target.copy_(source))
    print(json.dumps({"flops": product(torch.bfloat16), "tf32": product(torch.float32),
                      "bytes": rate}))


if __name__ == "__main__":
    main()
