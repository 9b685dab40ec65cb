"""Compares the Llama family with Hugging Face's transformers: same weights, same tokens.

    python3 bench/hf_llama.py --tool build/release/bench/gradients_of [--device cuda]

Each case makes a model of transformers from a configuration, with random weights in single
precision, and saves it with save_pretrained(), once in one file and once in several. Then

- the loss and all gradients of Reprise, from the saved files, are compared with those of
  transformers: the loss to 1e-6, each gradient to 1e-4 of its largest value;
- documents that are packed into rows, with padding, are compared with transformers' results
  for each document alone;
- the weights that Reprise exports are read by transformers again, and must be equal.

The small cases have sizes that fit nothing: an odd vocabulary and number of tokens, heads
that share keys unevenly, an odd hidden size of the feed-forward layer. Exit status: 1 if
something differs.

--reference uses tests/fixtures/llama_reference.py in the place of transformers, which need
not be installed then.
"""
import argparse
import dataclasses
import json
import math
import pathlib
import shutil
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from tensor_files import read_tensors, write_tensors  # noqa: E402

LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-4


@dataclasses.dataclass
class Case:
    """A model of Reprise (`preset`) with sizes, and what transformers calls them."""

    preset: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    batch: int
    tokens: int

    @property
    def qwen(self):
        return self.preset.startswith("qwen")

    @property
    def tied(self):
        return self.preset not in ("llama-2-7b", "llama-3-8b", "qwen2.5-7b")

    @property
    def theta(self):
        return {"llama-small": 1e4, "llama-2-7b": 1e4}.get(
            self.preset, 1e6 if self.qwen else 5e5)

    @property
    def stretch(self):
        """rope_scaling of Llama 3.2; None for the others."""
        if not self.preset.startswith("llama-3.2"):
            return None
        return {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

    @property
    def eps(self):
        return 1e-6 if self.qwen else 1e-5

    def flags(self):
        return ["--depth", self.layers, "--width", self.hidden, "--heads", self.heads,
                "--kv-heads", self.kv_heads, "--mlp-width", self.intermediate,
                "--vocab", self.vocab, "--seq", self.tokens]


SMALL = dict(layers=2, hidden=96, intermediate=133, heads=6, kv_heads=2, vocab=257, batch=3,
             tokens=37)
CASES = {
    "small": Case("llama-small", **SMALL),
    "small-scaled-rope": Case("llama-3.2-1b", **SMALL),
    "small-untied": Case("llama-3-8b", **SMALL),
    "small-bias": Case("qwen2.5-0.5b", **SMALL),
    "small-bias-untied": Case("qwen2.5-7b", **SMALL),
    # As many heads of keys as of queries, and one for all.
    "small-one-head-each": Case("llama-small", **{**SMALL, "kv_heads": 6}),
    "small-one-head": Case("llama-small", **{**SMALL, "kv_heads": 1, "tokens": 1 + 8 * 9}),
    "Qwen2.5-0.5B": Case("qwen2.5-0.5b", 24, 896, 4864, 14, 2, 151936, 2, 250),
    "Llama-3.2-1B": Case("llama-3.2-1b", 16, 2048, 8192, 32, 8, 128256, 2, 250),
}

class Transformers:
    """A model of transformers."""

    def __init__(self, case):
        from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config
        from transformers import __version__ as version

        sizes = dict(
            hidden_size=case.hidden, intermediate_size=case.intermediate,
            num_hidden_layers=case.layers, num_attention_heads=case.heads,
            num_key_value_heads=case.kv_heads, vocab_size=case.vocab,
            rms_norm_eps=case.eps, tie_word_embeddings=case.tied, use_cache=False,
            max_position_embeddings=131072, bos_token_id=0, eos_token_id=1)
        if int(version.split(".")[0]) >= 5:
            rope = {"rope_type": "default", **(case.stretch or {}), "rope_theta": case.theta}
            sizes["rope_parameters"] = rope
        else:
            sizes["rope_theta"] = case.theta
            if case.stretch:
                sizes["rope_scaling"] = case.stretch
        config = (Qwen2Config if case.qwen else LlamaConfig)(**sizes)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        self.model = self.model.float().train()

    def save(self, directory, several):
        size = sum(p.numel() * 4 for p in self.model.parameters())
        limit = {"max_shard_size": max(size // 3, 1)} if several else {"max_shard_size": "100GB"}
        self.model.save_pretrained(directory, **limit)

    def loss(self, tokens, labels):
        """Sum of the losses. transformers shifts the labels itself, and returns the mean."""
        count = (labels[:, 1:] != -100).sum()
        return self.model(input_ids=tokens, labels=labels, use_cache=False).loss * count

    @staticmethod
    def load(directory):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(directory).float().state_dict()


class Reference:
    """The same with the independent implementation of the tests."""

    def __init__(self, case):
        sys.path.insert(0, str(HERE.parent / "tests/fixtures"))
        import llama_reference

        config = llama_reference.Config(
            case.layers, case.hidden, case.intermediate, case.heads, case.kv_heads, case.vocab,
            case.theta, case.eps, llama_reference.Stretch() if case.stretch else None,
            case.tied, case.qwen)
        self.model = llama_reference.Llama(config)

    def save(self, directory, several):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text("{}")
        tensors = list(self.model.state_dict().items())
        if not several:
            write_tensors(directory / "model.safetensors", dict(tensors))
            return
        files = {}
        for i in range(3):
            name = f"model-0000{i + 1}-of-00003.safetensors"
            write_tensors(directory / name, dict(tensors[i::3]))
            files.update((key, name) for key, _ in tensors[i::3])
        index = directory / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": files}))

    def loss(self, tokens, labels):
        scores = self.model(tokens)[:, :-1].flatten(0, 1)
        return F.cross_entropy(scores, labels[:, 1:].flatten(), reduction="sum")

    @staticmethod
    def load(directory):
        return read_tensors(directory / "model.safetensors")


def shifted(labels):
    """Explicit targets: the label of the next token."""
    targets = torch.full_like(labels, -100)
    targets[:, :-1] = labels[:, 1:]
    return targets


def take_gradients(model):
    gradients = {name: p.grad.detach().cpu() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return gradients


class Comparison:
    def __init__(self, arguments, case, directory):
        self.arguments, self.case, self.directory = arguments, case, directory
        self.failed = False

    def ours(self, weights, batch, *flags):
        """Loss and gradients of Reprise."""
        write_tensors(self.directory / "batch.safetensors", batch)
        command = [self.arguments.tool, self.case.preset, "--weights", weights,
                   "--batch", self.directory / "batch.safetensors",
                   "--out", self.directory / "result.safetensors",
                   "--device", self.arguments.device, *self.case.flags(), *flags]
        subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
        result = read_tensors(self.directory / "result.safetensors")
        loss = result.pop("loss").item()
        return loss, {name[len("grad."):]: t for name, t in result.items()}

    def compare(self, what, expected, found):
        loss, gradients = expected
        own_loss, own_gradients = found
        difference = abs(loss - own_loss) / abs(loss)
        if gradients.keys() != own_gradients.keys():
            names = sorted(gradients.keys() ^ own_gradients.keys())
            print(f"  {what}: parameters differ: {', '.join(names[:5])}")
            self.failed = True
            return
        worst, name = max(
            (((a - own_gradients[key]).abs().max() / a.abs().max()).item(), key)
            for key, a in gradients.items())
        good = difference <= LOSS_TOLERANCE and worst <= GRADIENT_TOLERANCE
        good = good and math.isfinite(own_loss)
        self.failed |= not good
        print(f"  {what}: loss {loss:.6f}, difference {difference:.1e}; gradients "
              f"{worst:.1e} ({name}){'' if good else '  DIFFERENT'}")

    def check_export(self, exported, theirs):
        """What they read from an export equals their own weights."""
        read = theirs.load(exported)
        own = theirs.model.state_dict()
        different = [name for name, t in own.items()
                     if name not in read or not torch.equal(t.cpu(), read[name].cpu())]
        self.failed |= bool(different)
        print(f"  exported weights: {len(own)} tensors, "
              + (f"DIFFERENT: {', '.join(different[:5])}" if different else "equal"))


def documents_of(case):
    """(row, first, length) of each packed document; the rest of each row is padding."""
    third = case.tokens // 3
    yield 0, 0, third
    yield 0, third, case.tokens - third
    for row in range(1, case.batch):
        yield row, row, third + row
        yield row, third + 2 * row, case.tokens - third - 2 * row - 3


def packed_batch(case, tokens, labels):
    segments = torch.zeros_like(tokens)
    targets = torch.full_like(labels, -100)
    number = {}
    for row, first, length in documents_of(case):
        part = slice(first, first + length)
        number[row] = number.get(row, 0) + 1
        segments[row, part] = number[row]
        targets[row, part] = shifted(labels[row : row + 1, part])[0]
    return {"x": tokens, "targets": targets, "segments": segments}


def compare_case(name, case, arguments, directory):
    print(f"{name}: {case.preset}, {case.layers} layers of {case.hidden}")
    torch.manual_seed(1)
    theirs = (Reference if arguments.reference else Transformers)(case)
    with torch.no_grad():  # away from ones and zeros
        for parameter in theirs.model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    comparison = Comparison(arguments, case, directory)
    tokens = torch.randint(case.vocab, (case.batch, case.tokens))
    labels = tokens.clone()
    labels[0, : case.tokens // 4] = -100
    for several in (False, True):
        theirs.save(directory / ("several" if several else "one"), several)
    theirs.model.to(arguments.device)

    def their_loss(x, y):
        loss = theirs.loss(x.to(arguments.device), y.to(arguments.device))
        loss.backward()
        return loss.item()

    expected = (their_loss(tokens, labels), take_gradients(theirs.model))
    batch = {"x": tokens, "targets": shifted(labels)}
    export = directory / "exported"
    shutil.copytree(directory / "one", export, ignore=shutil.ignore_patterns("*.safetensors"))
    found = comparison.ours(directory / "one", batch, "--export", export / "model.safetensors")
    comparison.compare("one file", expected, found)
    found = comparison.ours(directory / "several", batch, "--recompute", "all")
    comparison.compare("several files, recomputed", expected, found)
    loss = 0.0
    for row, first, length in documents_of(case):
        part = slice(first, first + length)
        loss += their_loss(tokens[row : row + 1, part], tokens[row : row + 1, part])
    expected = (loss, take_gradients(theirs.model))
    found = comparison.ours(directory / "one", packed_batch(case, tokens, tokens))
    comparison.compare("packed documents", expected, found)
    comparison.check_export(export, theirs)
    return not comparison.failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tool", required=True, help="the program gradients_of")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--reference", action="store_true", help="without transformers")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    failed = []
    for name in arguments.only:
        with tempfile.TemporaryDirectory() as directory:
            if not compare_case(name, CASES[name], arguments, pathlib.Path(directory)):
                failed.append(name)
    print(f"different: {', '.join(failed)}" if failed else "all equal")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
