"""Splits models with examples/script/split_model.py, compares their gradients in Reprise with
those that PyTorch computes in Python, and trains one within a memory budget. Skipped (77)
without torch for Python. Arguments: REPRISE-TESTS SCRIPT-EXAMPLE LIBTORCH-VERSION
"""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

try:
    import torch
except ImportError as missing:
    print(f"split_model_test: skipped, {missing}", file=sys.stderr)
    sys.exit(77)

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples/script"
sys.path.insert(0, str(EXAMPLE))
import split_model  # noqa: E402

TESTS, PROGRAM, LIBTORCH = sys.argv[1:4]


class Tied(torch.nn.Module):
    """Tokens and a mask; the output layer shares the weight of the embedding."""

    class Embed(torch.nn.Module):
        def __init__(self, table):
            super().__init__()
            self.table = table

        def forward(self, tokens):
            return self.table(tokens)

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(8)
            self.linear = torch.nn.Linear(8, 8)
            self.linear.bias.requires_grad_(False)
            self.dropout = torch.nn.Dropout(0.3)

        def forward(self, x, mask):
            y = self.dropout(torch.tanh(self.linear(self.norm(x))))
            return x + y * mask.unsqueeze(-1), mask

    class Output(torch.nn.Module):
        def __init__(self, table):
            super().__init__()
            self.table = table

        def forward(self, x, mask):
            return ((x * mask.unsqueeze(-1)).sum(1)) @ self.table.weight.t()

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(11, 8)
        self.embed = self.Embed(self.table)
        self.layers = torch.nn.ModuleList(self.Block() for _ in range(3))
        self.output = self.Output(self.table)

    def forward(self, tokens, mask):
        x = self.embed(tokens)
        for layer in self.layers:
            x, mask = layer(x, mask)
        return self.output(x, mask)


class Unscriptable(torch.nn.Module):
    """torch.jit.script() does not accept keyword arguments in a dictionary."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.dropout = torch.nn.Dropout(0.4)

    def forward(self, x):
        options = dict(negative_slope=0.1)
        return self.dropout(torch.nn.functional.leaky_relu(self.norm(self.linear(x)), **options))


class FixedBatch(torch.nn.Module):
    """A trace of it has the number of samples as a constant."""

    def forward(self, x):
        options = dict(negative_slope=0.1)
        return torch.nn.functional.leaky_relu(x.reshape(int(x.shape[0]), 6), **options)


class Autocast(torch.nn.Module):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            return torch.mm(x, x.t())


def traced_model():
    return torch.nn.Sequential(Unscriptable(), Unscriptable(), torch.nn.Linear(6, 4))


def sum_of_squares(x, targets):
    return ((x - targets) ** 2).sum()


class SplitModel(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(3)
        self.folder = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self.folder.name) / "stages"

    def tearDown(self):
        self.folder.cleanup()

    def model(self):
        return json.loads((self.path / "model.json").read_text())

    def compare(self, model, inputs, targets, loss):
        """One step in Python, and the same in Reprise."""
        model.train()
        torch.manual_seed(5)
        total = loss(model(*inputs), targets)
        total.backward()
        expected = {"loss": total}
        for i, tensor in enumerate((*inputs, targets)):
            expected[f"input.{i}"] = tensor
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                expected[f"grad.{name}"] = parameter.grad
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                expected[f"buffer.{name}"] = buffer
        split_model.write_safetensors(self.path / "expected.safetensors", expected)
        environment = {**os.environ, "REPRISE_SPLIT_MODEL": str(self.path)}
        if torch.__version__.split("+")[0].startswith(LIBTORCH):
            environment["REPRISE_SAME_LIBTORCH"] = "1"
        run = subprocess.run([TESTS, "--gtest_filter=ScriptModel.GradientsEqualThoseOfPython"],
                             env=environment, capture_output=True, text=True)
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        self.assertIn("[  PASSED  ] 1 test", run.stdout)

    def test_residual_network(self):
        model = split_model.SmallResNet(width=4)
        inputs, targets = (torch.randn(5, 3, 16, 16),), torch.randint(10, (5,))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        split_model.split(model, ["stem", "layer1.*", "layer2.*", ("mean", split_model.MeanOfPixels()),
                                  "dropout", "fc"], inputs, self.path, example_targets=targets)
        for name, tensor in model.state_dict().items():
            self.assertTrue(torch.equal(tensor, before[name]), name)
        self.assertEqual([stage["name"] for stage in self.model()["stages"]],
                         ["stem", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "mean",
                          "dropout", "fc", "loss"])
        self.compare(model, inputs, targets,
                     lambda y, t: torch.nn.functional.cross_entropy(y, t, reduction="sum"))

    def test_tied_weights_two_inputs_and_frozen_parameters(self):
        model = Tied()
        inputs = (torch.randint(11, (4, 7)), torch.rand(4, 7).gt(0.3).float())
        split_model.split(model, ["embed", "layers.*", "output"], inputs, self.path,
                          loss=sum_of_squares)
        stages = self.model()["stages"]
        self.assertEqual([stage["inputs"] for stage in stages], [1, 2, 2, 2, 2, 2])
        self.assertEqual(stages[0]["tensors"], {"table.weight": "table.weight"})
        self.assertEqual(stages[4]["tensors"], {"table.weight": "table.weight"})
        self.compare(model, inputs, torch.randn(4, 11), sum_of_squares)

    def test_traced_blocks(self):
        model = traced_model()
        inputs = (torch.randn(8, 6),)
        split_model.split(model, ["*"], inputs, self.path, loss=sum_of_squares)
        self.assertIn("evaluation", self.model()["stages"][0])
        self.assertNotIn("evaluation", self.model()["stages"][2])
        self.compare(model, inputs, torch.randn(8, 4), sum_of_squares)

    def test_rejects_blocks_that_are_not_the_model(self):
        model = split_model.SmallResNet(width=4)
        inputs = (torch.randn(2, 3, 16, 16),)
        every = ["stem", "layer1.*", "layer2.*", ("mean", split_model.MeanOfPixels()), "dropout", "fc"]

        def refused(text, blocks, **more):
            with self.assertRaisesRegex(ValueError, text):
                split_model.split(model, blocks, inputs, self.path, **more)
            self.assertFalse(self.path.exists())

        refused("the model has no 'layer7.*'", ["stem", "layer7.*"])
        refused("got 'stem' 2 times", ["stem", *every])
        refused("differ by up to", ["stem", "layer1.1", "layer1.0", *every[2:]])
        refused("use reduction='sum'", every, example_targets=torch.arange(2),
                loss=torch.nn.CrossEntropyLoss())
        refused("a single number", every, example_targets=torch.arange(2),
                loss=torch.nn.CrossEntropyLoss(reduction="none"))

    def test_rejects_a_trace_for_one_batch_size(self):
        model = torch.nn.Sequential(FixedBatch(), torch.nn.Linear(6, 4))
        with self.assertRaisesRegex(ValueError, "block '0' fails for half of the samples"):
            split_model.split(model, ["*"], (torch.randn(8, 6),), self.path)

    def test_autocast_in_a_script_is_rejected(self):
        model = torch.nn.Sequential(Autocast())
        split_model.split(model, ["0"], (torch.randn(8, 6),), self.path)
        run = subprocess.run([PROGRAM, self.path, "1GiB"], capture_output=True, text=True)
        self.assertEqual(run.returncode, 1)
        self.assertIn("[script '0'] expected no `with torch.autocast` block, got one in forward()",
                      run.stderr)

    def test_trains_the_demonstration_within_a_budget(self):
        subprocess.run([sys.executable, EXAMPLE / "split_model.py", self.path], check=True,
                       stdout=subprocess.DEVNULL)
        whole, peak = self.train("1GiB")
        budget = int(0.6 * peak)
        planned, smaller = self.train(str(budget))
        self.assertEqual(planned, whole)  # the same loss and accuracy, with recomputation
        self.assertLessEqual(smaller, 1.01 * budget)  # the figure is rounded
        run = subprocess.run([PROGRAM, self.path, "1MiB"], capture_output=True, text=True)
        self.assertEqual(run.returncode, 1)
        self.assertIn("nothing fits into 1.00 MiB", run.stderr)
        run = subprocess.run([PROGRAM, self.path / "none", "8MiB"], capture_output=True, text=True)
        self.assertEqual(run.returncode, 1)
        self.assertIn("none/model.json", run.stderr)

    def train(self, budget):
        """Runs the example; returns its loss and accuracy, and the peak in bytes."""
        run = subprocess.run([PROGRAM, self.path, budget], capture_output=True, text=True)
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        line = re.match(r"SmallResNet: (loss [0-9.]+, accuracy [0-9.]+), peak ([0-9.]+) MiB of ",
                        run.stdout)
        self.assertTrue(line, run.stdout)
        return line[1], float(line[2]) * 2**20


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
