"""Runs the Python sample of docs/training.md. Argument: directory of the extracted samples/.

Needs torch for Python, and is skipped (status 77) without it.
"""
import os
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SAMPLE = "samples/split.py"

try:
    import torch
except ImportError:
    print("skipped: python3 has no torch")
    sys.exit(77)


def block(wide):
    return torch.nn.Sequential(torch.nn.Linear(wide, wide), torch.nn.ReLU())


def names():
    """What the sample uses."""
    torch.manual_seed(1)
    layers = {"stem": block(4), "layer1": torch.nn.Sequential(block(4), block(4)),
              "layer2": torch.nn.Sequential(block(4)), "head": torch.nn.Linear(4, 3)}

    def my_loss(scores, targets):
        return torch.nn.functional.cross_entropy(scores, targets, reduction="sum")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, layer in layers.items():
                self.add_module(name, layer)

        def forward(self, x):
            for layer in layers.values():
                x = layer(x)
            return x

    return {"torch": torch, "model": Model(), "images": torch.randn(6, 4),
            "labels": torch.randint(3, (6,)), "my_loss": my_loss}


def main(folder):
    code = (pathlib.Path(folder) / SAMPLE).read_text()
    sys.path.insert(0, str(ROOT / "examples/script"))
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        exec(compile(code, SAMPLE, "exec"), names())  # pylint: disable=exec-used
        written = sorted(path.name for path in pathlib.Path("stages").iterdir())
        os.chdir(ROOT)
    if "model.json" not in written:
        print(f"expected stages/model.json, got {written}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
