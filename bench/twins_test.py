"""Compares small models of the zoo and of bench/plain with their PyTorch twins on the CPU.

    python3 bench/twins_test.py REPRISE PLUGIN

gpu.py compares the losses. Exit status: 1 if they differ, 77 (skipped) without PyTorch.
"""
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
TEXT = "--depth 1 --width 32 --heads 2 --vocab 70 --seq 12"
CASES = [
    f"--model qwen2.5-0.5b --batch 2 --kv-heads 1 --mlp-width 48 {TEXT}",
    "--model cnn-blocks --batch 2 --accumulate 2 --depth 2 --width 4 --image-size 28",
    "--model unet --batch 2 --depth 2 --width 4 --image-size 16",
    f"--model plain-encoder --batch 2 {TEXT}",
]
VISION = ["--model vit-b-16 --batch 2 --depth 1 --width 32 --heads 2 --image-size 32"]


def gpu(words):
    answer = subprocess.run(
        [sys.executable, HERE / "gpu.py", sys.argv[1], "--plugin", sys.argv[2],
         "--device", "cpu", "--precision", "fp32", "--repeats", "1", *words.split()],
        stdout=subprocess.PIPE, text=True)
    print(words, answer.stdout, sep="\n", flush=True)
    return answer


def agrees(answer):
    return answer.returncode == 0 and "losses within" in answer.stdout


def check_gpt2():
    """Whether the losses agree, and one that is then off by 1 % is reported without times."""
    words = f"--model gpt2 --batch 2 --accumulate 2 --techniques checkpoint {TEXT} --keep "
    with tempfile.TemporaryDirectory() as folder:
        kept = pathlib.Path(folder) / "kept.json"
        if not agrees(gpu(words + str(kept))):
            return False
        answers = json.loads(kept.read_text())
        for answer in answers.values():
            answer["losses"][-1] *= 1.01
        kept.write_text(json.dumps(answers))
        answer = gpu(words + str(kept))
    return answer.returncode == 1 and "DIFFER" in answer.stdout and \
        "graph" not in answer.stdout


def main():
    if not importlib.util.find_spec("torch"):
        return 77
    cases = CASES + (VISION if importlib.util.find_spec("torchvision") else [])
    failed = [words for words in cases if not agrees(gpu(words))]
    if not check_gpt2():
        failed.append("gpt2")
    print("failed: " + "; ".join(failed) if failed else "all agree")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
