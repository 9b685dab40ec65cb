"""llm.c's train_gpt2cu on random tokens, for bench/gpu.py.

    python3 bench/peers/llmc.py train --binary PATH --model gpt2 --micro 4 --accumulate 8

Prints one line of JSON: samples per second, and the memory that it allocates. It begins with
weights of its own, so there are no losses to compare. --recompute 1 recomputes GELU, 2 also
LayerNorm.
"""
import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import tempfile

import numpy

DEPTHS = {"gpt2": 12, "gpt2-medium": 24, "gpt2-large": 36, "gpt2-xl": 48}
VOCABULARY = 50257
UPDATES, WARM_UP = 24, 8
MIB = 2**20


def write_tokens(path, count):
    """The header that llm.c expects, 256 integers, and the tokens."""
    header = numpy.zeros(256, dtype=numpy.int32)
    header[:3] = 20240520, 1, count
    tokens = numpy.random.default_rng(0).integers(0, VOCABULARY, count, dtype=numpy.uint16)
    path.write_bytes(header.tobytes() + tokens.tobytes())


def library_path():
    """The search path of libraries with the cuDNN of a Python package, if there is one."""
    found = [os.environ.get("LD_LIBRARY_PATH", "")]
    try:
        import nvidia.cudnn
        found.insert(0, str(pathlib.Path(list(nvidia.cudnn.__path__)[0]) / "lib"))
    except ImportError:
        pass
    return ":".join(path for path in found if path)


def train(args, folder):
    window = args.micro * args.accumulate
    tokens, check = folder / "train.bin", folder / "check.bin"
    write_tokens(tokens, (UPDATES + 2) * window * args.seq + 1)
    write_tokens(check, (args.micro + 1) * args.seq + 1)
    words = {"-i": tokens, "-j": check, "-e": f"d{DEPTHS[args.model]}", "-b": args.micro,
             "-t": args.seq, "-d": window * args.seq, "-x": UPDATES, "-r": args.recompute,
             "-l": 1e-4, "-w": 1, "-v": 1000, "-m": 1, "-s": 0, "-h": 0, "-lg": 1000}
    answer = subprocess.run(
        [args.binary, *(str(word) for pair in words.items() for word in pair)],
        capture_output=True, text=True, cwd=folder,
        env={**os.environ, "LD_LIBRARY_PATH": library_path()})
    return answer.stdout + answer.stderr


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("train",))
    parser.add_argument("--binary", type=pathlib.Path, required=True)
    parser.add_argument("--model", choices=DEPTHS, default="gpt2")
    parser.add_argument("--micro", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--recompute", choices=("0", "1", "2"), default="0")
    args = parser.parse_args()
    args.binary = args.binary.resolve()
    with tempfile.TemporaryDirectory() as folder:
        text = train(args, pathlib.Path(folder))
    speeds = [float(speed.replace(",", "")) for speed in re.findall(r"([\d.,]+) tok/s", text)]
    if len(speeds) < WARM_UP + 2:
        raise SystemExit("llm.c: " + (text.strip().splitlines() or ["no output"])[-1])
    # The last update is left out, since it may include a validation.
    speed = statistics.median(speeds[WARM_UP:-1])
    parts = [int(size) for size in re.findall(r"allocat\w* (\d+) MiB", text)]
    used = re.findall(r"device memory usage: (\d+) MiB", text)
    memory = sum(parts) or (int(used[-1]) if used else 0)
    print(json.dumps({"losses": [], "samples_per_s": speed / args.seq,
                      "peak_bytes": memory * MIB}), flush=True)


if __name__ == "__main__":
    main()
