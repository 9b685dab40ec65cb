"""Splits a torch.nn.Module into TorchScript stages, which Reprise trains within a memory budget.

    from split_model import split
    split(model, ["stem", "layer1.*", "layer2.*", "head"], (images,), "stages")

writes the directory `stages`, which reprise::load_script_model("stages") reads; main.cpp
trains it. Run as a program, this file splits a small ResNet as a demonstration:

    python3 split_model.py stages

The directory contains model.json (the stages in order), one TorchScript file per stage, and
weights.safetensors with all parameters and buffers under their names in the model. Needs
only torch, version 1.13 or later.
"""
import contextlib
import ctypes
import fnmatch
import inspect
import json
import pathlib
import struct
import sys
from typing import List

import torch

VERSION = 1
TYPES = {torch.float32: "F32", torch.float64: "F64", torch.float16: "F16",
         torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
         torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}


class CrossEntropySum(torch.nn.Module):
    """Sum of the cross entropies; in evaluation also the number of correct predictions."""

    def forward(self, scores: torch.Tensor, targets: torch.Tensor) -> List[torch.Tensor]:
        loss = torch.nn.functional.cross_entropy(scores.float(), targets, reduction="sum")
        if self.training:
            return [loss]
        return [loss, (scores.argmax(1) == targets).sum()]


class _Function(torch.nn.Module):
    """A loss that is a function, as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, scores, targets):
        return self.function(scores, targets)


class _Stage:
    """A block with its script."""

    def __init__(self, name, module):
        self.name = name
        self.module = module
        self.script = None
        self.evaluation = None  # a second trace, for evaluation mode
        self.inputs = 0
        self.outputs = 0

    def train(self, on):
        for module in (self.module, self.script, self.evaluation):
            if module is not None:
                module.train(on)

    def __call__(self, tensors, training):
        """Runs the script on the first tensors and passes the others on."""
        script = self.script if training or self.evaluation is None else self.evaluation
        with torch.jit.optimized_execution(False):
            results = _tensors(script(*tensors[:self.inputs]), f"block '{self.name}'")
        return results + tensors[self.inputs:]


def split(model, blocks, example_inputs, directory, loss=None, example_targets=None, name=None):
    """Writes `model` to `directory` as a chain of TorchScript stages.

    model           a torch.nn.Module on the CPU; it is not changed
    blocks          the blocks whose composition is the model, in order: names of submodules,
                    with wildcards for one component ("layers.*"), or pairs (name, module) for
                    code between them, such as ("flatten", torch.nn.Flatten(1))
    example_inputs  the inputs of model(*example_inputs), a tuple of tensors
    loss            a module or function of (outputs of the model, targets), which returns the
                    sum of the losses of the samples, and optionally the number of correct
                    predictions in a list; default: cross entropy
    example_targets targets of the example, to check the loss (optional)
    name            of the model; default: the name of its class

    A block takes as many tensors as its forward() has parameters without default. It gets the
    first tensors of what the blocks before it passed on, and the remaining ones follow its
    outputs. Parameters that blocks share stay shared.

    A block that torch.jit.script() does not accept is traced, once for training and once for
    evaluation, which is reported on standard error. A trace has no control flow that depends
    on the inputs, and sizes that the code computes in Python are fixed.

    Raises ValueError if the blocks do not compute what the model computes.
    """
    inputs = list(example_inputs) if isinstance(example_inputs, (tuple, list)) else [example_inputs]
    _check_model(model, inputs)
    stages = [_Stage(*item) for item in _find_blocks(model, blocks)]
    with _unchanged(model, *(stage.module for stage in stages)):
        tensors = inputs
        for stage in stages:
            tensors = _make_script(stage, tensors)
        _check_outputs(model, stages, inputs)
        stages.append(_loss_stage(loss, tensors, example_targets))
        _write(model, stages, len(inputs), pathlib.Path(directory), name)


def _check_model(model, inputs):
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type != "cpu":
            raise ValueError(f"expected a model on the CPU, got '{name}' on {tensor.device}; "
                             "call model.cpu() first")
    if not all(isinstance(item, torch.Tensor) for item in inputs):
        raise ValueError("expected a tuple of tensors as example_inputs")


@contextlib.contextmanager
def _unchanged(*modules):
    """Restores the buffers and modes of modules, and the random numbers."""
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    modes = [(child, child.training) for module in modules for child in module.modules()]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            for child, training in modes:
                child.training = training


def _find_blocks(model, blocks):
    modules = dict(model.named_modules())
    found = []
    for block in blocks:
        if not isinstance(block, str):
            found.append(block)
            continue
        parts = block.split(".")
        names = [name for name in modules if name and len(name.split(".")) == len(parts) and
                 all(map(fnmatch.fnmatchcase, name.split("."), parts))]
        if not names:
            raise ValueError(f"expected names of submodules, but the model has no '{block}'; it "
                             f"has {', '.join(name for name, _ in model.named_children())}")
        found += [(name, modules[name]) for name in names]
    names = [name for name, _ in found] + ["loss"]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"expected every block once, got '{name}' {names.count(name)} times")
    return found


def _tensors(value, what):
    """The tensors that a forward() returns, as a list."""
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    if not values or not all(isinstance(item, torch.Tensor) for item in values):
        raise ValueError(f"{what}: expected a tensor, or a tuple or list of tensors, got "
                         f"{type(value).__name__}")
    return values


def _make_script(stage, tensors):
    """Makes the script of a stage. Returns the tensors behind it."""
    parameters = inspect.signature(stage.module.forward).parameters.values()
    stage.inputs = sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
                       for p in parameters) or 1
    if stage.inputs > len(tensors):
        raise ValueError(f"block '{stage.name}' takes {stage.inputs} tensors, but the blocks "
                         f"before it pass on {len(tensors)}")
    arguments = tuple(t.detach() for t in tensors[:stage.inputs])
    try:
        stage.script = torch.jit.script(stage.module)
        results = _run(stage, tensors)
    except Exception as error:  # torch.jit raises several types
        reason = str(error).strip().splitlines()[0]
        print(f"split_model: block '{stage.name}' is traced, because torch.jit.script failed: "
              f"{reason}", file=sys.stderr)
        stage.script, stage.evaluation = (_trace(stage.module, arguments, on)
                                          for on in (True, False))
        results = _run(stage, tensors)
    stage.outputs = len(results) - len(tensors) + stage.inputs
    return results


def _run(stage, tensors):
    stage.train(False)
    with torch.no_grad():
        return stage(tensors, training=False)


def _trace(module, arguments, training):
    with _unchanged(module):
        module.train(training)
        return torch.jit.trace(module, arguments, check_trace=False)


def _check_outputs(model, stages, inputs):
    """Compares the composition of the scripts with the model in both modes, and for half of
    the samples, because the planner chooses other batch sizes."""
    cases = [("in evaluation mode", False, inputs), ("in training mode", True, inputs)]
    if all(t.dim() > 0 and len(t) == len(inputs[0]) > 1 for t in inputs):
        half = [t[:len(t) // 2] for t in inputs]
        cases.append(("for half of the samples", False, half))
    modules = [model, *(stage.module for stage in stages)]
    for what, training, batch in cases:
        with torch.no_grad(), _unchanged(*modules):
            model.train(training)
            torch.manual_seed(0)
            expected = _tensors(model(*batch), "the model")
        with torch.no_grad(), _unchanged(*modules):
            torch.manual_seed(0)
            actual = batch
            for stage in stages:
                stage.train(training)
                try:
                    actual = stage(actual, training)
                except RuntimeError as error:
                    reason = str(error).strip().splitlines()[-1]
                    raise ValueError(f"block '{stage.name}' fails {what}: {reason}") from error
        _compare(actual, expected, what)


def _compare(actual, expected, what):
    if len(actual) != len(expected):
        raise ValueError(f"expected that the blocks return the {len(expected)} outputs of the "
                         f"model, got {len(actual)} tensors; a block must take those that are "
                         "left over")
    for a, b in zip(actual, expected):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(f"expected outputs of {b.dtype} {list(b.shape)} {what}, as the model "
                             f"returns, got {a.dtype} {list(a.shape)} from the blocks")
        if not torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True):
            raise ValueError(f"expected that the blocks compute the same as the model, but {what} "
                             f"their outputs differ by up to {(a - b).abs().max().item():.3g}; "
                             "does the model's forward() do more than call them in this order?")


def _loss_stage(loss, outputs, targets):
    module = CrossEntropySum() if loss is None else loss
    if not isinstance(module, torch.nn.Module):
        module = _Function(module)
    stage = _Stage("loss", module)
    stage.script = torch.jit.script(module)
    stage.inputs = len(outputs) + 1
    stage.outputs = 1
    if targets is None:
        return stage
    module.train(True)
    half = len(targets) // 2

    def run(part):
        with torch.no_grad(), torch.jit.optimized_execution(False):
            sums = _tensors(stage.script(*(t[part] for t in outputs), targets[part]), "the loss")
        if sums[0].numel() != 1:
            raise ValueError(f"expected the sum of the losses, a single number, got "
                             f"{sums[0].numel()} numbers from the loss")
        return sums[0].double()

    whole, parts = run(slice(None)), run(slice(0, half)) + run(slice(half, None))
    if not torch.allclose(whole, parts, rtol=1e-4):
        raise ValueError(f"expected the sum of the losses, but that of the batch is "
                         f"{whole.item():.6g} and those of its halves add up to "
                         f"{parts.item():.6g}; use reduction='sum'")
    return stage


def _own_tensors(module):
    """All parameters and buffers by name, including those that have several names."""
    for path, child in module.named_modules(remove_duplicate=False):
        for name, tensor in [*child._parameters.items(), *child._buffers.items()]:
            if tensor is not None:
                yield (f"{path}.{name}" if path else name), tensor


def _write(model, stages, inputs, directory, name):
    directory.mkdir(parents=True, exist_ok=True)
    first_names = {}
    for full, tensor in _own_tensors(model):
        first_names.setdefault(id(tensor), full)
    weights = {}
    entries = []
    for number, stage in enumerate(stages):
        originals = dict(_own_tensors(stage.module))
        entry = {"name": stage.name, "file": f"{number:03}-{stage.name}.pt",
                 "inputs": stage.inputs, "outputs": stage.outputs, "tensors": {}}
        # The script also has the tensors that are plain attributes in Python.
        for local, tensor in _own_tensors(stage.script):
            tensor = originals.get(local, tensor)
            full = first_names.get(id(tensor), f"{stage.name}.{local}")
            entry["tensors"][local] = full
            weights[full] = tensor
        stage.train(True)
        stage.script.save(str(directory / entry["file"]))
        if stage.evaluation is not None:
            entry["evaluation"] = f"{number:03}-{stage.name}-evaluation.pt"
            stage.evaluation.save(str(directory / entry["evaluation"]))
        entries.append(entry)
    write_safetensors(directory / "weights.safetensors", weights)
    text = {"version": VERSION, "name": name or type(model).__name__, "dtype": _type_of(model),
            "inputs": inputs, "stages": entries}
    (directory / "model.json").write_text(json.dumps(text, indent=2) + "\n")


def _type_of(model):
    types = {str(parameter.dtype)[len("torch."):] for parameter in model.parameters()}
    if len(types) > 1:
        raise ValueError(f"expected parameters of one type, got {', '.join(sorted(types))}")
    return types.pop() if types else "float32"


def write_safetensors(path, tensors):
    """8 bytes of header length, a JSON header, and the tensors in little-endian order."""
    if sys.byteorder != "little":
        raise ValueError("expected a little-endian machine")
    header, parts, offset = {}, [], 0
    for name, tensor in sorted(tensors.items()):
        tensor = tensor.detach().contiguous()
        size = tensor.numel() * tensor.element_size()
        parts.append(ctypes.string_at(tensor.data_ptr(), size) if size else b"")
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pathlib.Path(path).write_bytes(b"".join([struct.pack("<Q", len(text)), text, *parts]))


class BasicBlock(torch.nn.Module):
    """Two convolutions with a shortcut, as in ResNet-18."""

    def __init__(self, channels, out_channels, stride):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(channels, out_channels, 3, stride, 1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(out_channels)
        self.conv2 = torch.nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.bn2 = torch.nn.BatchNorm2d(out_channels)
        self.shortcut = torch.nn.Sequential()
        if stride != 1 or channels != out_channels:
            self.shortcut = torch.nn.Sequential(
                torch.nn.Conv2d(channels, out_channels, 1, stride, bias=False),
                torch.nn.BatchNorm2d(out_channels))

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class SmallResNet(torch.nn.Module):
    """ResNet for images of 3×32×32 in ten classes."""

    def __init__(self, width=16, classes=10):
        super().__init__()
        self.stem = torch.nn.Sequential(torch.nn.Conv2d(3, width, 3, 1, 1, bias=False),
                                        torch.nn.BatchNorm2d(width), torch.nn.ReLU())
        self.layer1 = torch.nn.Sequential(BasicBlock(width, width, 1), BasicBlock(width, width, 1))
        self.layer2 = torch.nn.Sequential(BasicBlock(width, 2 * width, 2),
                                          BasicBlock(2 * width, 2 * width, 1))
        self.dropout = torch.nn.Dropout(0.1)
        self.fc = torch.nn.Linear(2 * width, classes)

    def forward(self, x):
        x = self.layer2(self.layer1(self.stem(x)))
        return self.fc(self.dropout(x.mean((2, 3))))


class MeanOfPixels(torch.nn.Module):
    """The part of SmallResNet.forward() that is no submodule."""

    def forward(self, x):
        return x.mean((2, 3))


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: python3 split_model.py DIRECTORY")
    torch.manual_seed(1)
    split(SmallResNet(),
          ["stem", "layer1.*", "layer2.*", ("mean", MeanOfPixels()), "dropout", "fc"],
          (torch.randn(4, 3, 32, 32),), sys.argv[1], example_targets=torch.arange(4))
    print(f"written to {sys.argv[1]}")


if __name__ == "__main__":
    main()
