"""Twins of the zoo's models of tokens: GPT-2 in plain PyTorch, BERT, Llama and Qwen of
Hugging Face's transformers."""
import math
import os
import pathlib
import sys

import torch
from torch import nn
from torch.nn import functional as F

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def transformers(name):
    try:
        import transformers
    except ImportError as error:
        raise SystemExit(f"the twin of {name} needs transformers: {error}") from None
    return transformers


def causal_attention(q, k, v):
    if hasattr(F, "scaled_dot_product_attention"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    return scores.masked_fill(later, -math.inf).softmax(-1).to(v.dtype) @ v


def language_loss(scores, targets):
    return F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten(), reduction="sum")


class Gpt2Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        n, t, c = x.shape
        parts = self.attend(self.before(x)).split(c, 2)
        q, k, v = (p.view(n, t, self.heads, c // self.heads).transpose(1, 2) for p in parts)
        y = causal_attention(q, k, v)
        x = x + self.mix(y.transpose(1, 2).reshape(n, t, c))
        return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, options):
        super().__init__()
        width = options["width"]
        self.tokens = nn.Embedding(options["vocab"], width)
        self.places = nn.Embedding(options["seq"], width)
        self.blocks = nn.ModuleList(Gpt2Block(width, options["heads"])
                                    for _ in range(options["depth"]))
        self.norm = nn.LayerNorm(width)
        self.run_head = self.head
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.places.weight[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.run_head(x, targets)

    def head(self, x, targets):
        return language_loss(F.linear(self.norm(x), self.tokens.weight), targets)

    def compile_rest(self):
        """Compiles what is outside of the blocks."""
        self.run_head = torch.compile(self.head)


GPT2_LAYERS = {"before": "ln_1", "attend": "attn.c_attn", "mix": "attn.c_proj",
               "between": "ln_2", "up": "mlp.c_fc", "down": "mlp.c_proj"}
GPT2_REST = {"tokens": "wte", "places": "wpe", "norm": "ln_f"}


def gpt2_names(state):
    """Tensors with Hugging Face's names, whose matrices are transposed."""
    result = {}
    for name, tensor in state.items():
        stem, kind = name.rsplit(".", 1)
        if stem in GPT2_REST:
            result[f"transformer.{GPT2_REST[stem]}.{kind}"] = tensor
            continue
        _, number, layer = stem.split(".")
        turned = tensor.t() if tensor.dim() == 2 else tensor
        result[f"transformer.h.{number}.{GPT2_LAYERS[layer]}.{kind}"] = turned
    return result


class Scored(nn.Module):
    """Sum of the losses of a model's scores."""

    def __init__(self, body, call, loss):
        super().__init__()
        self.body, self.call, self.loss = body, call, loss

    def forward(self, x, y):
        return self.loss(self.call(self.body, x), y)


def hugging_face_scores(model, tokens):
    return model(input_ids=tokens).logits


def class_loss(scores, targets):
    return F.cross_entropy(scores.float(), targets, reduction="sum")


def make_gpt2(name, options, dropout):
    return Gpt2(options)


def make_bert(name, options, dropout):
    library = transformers(name)
    config = library.BertConfig(
        hidden_size=options["width"], num_hidden_layers=options["depth"],
        num_attention_heads=options["heads"], intermediate_size=4 * options["width"],
        vocab_size=options["vocab"], max_position_embeddings=options["seq"],
        num_labels=options["classes"], hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout)
    body = library.AutoModelForSequenceClassification.from_config(
        config, attn_implementation="sdpa")
    return Scored(body, hugging_face_scores, class_loss)


ROPE_3_2 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


UNTIED = ("llama-2-7b", "llama-3-8b", "qwen2.5-7b")  # their output layers have a weight


def make_llama(name, options, dropout):
    qwen = name.startswith("qwen")
    try:
        import transformers as library
    except ImportError:
        return make_reference_llama(name, options)
    theta = 1e4 if name in ("llama-small", "llama-2-7b") else 1e6 if qwen else 5e5
    scaling = ROPE_3_2 if name.startswith("llama-3.2") else None
    sizes = dict(
        hidden_size=options["width"], intermediate_size=options["mlp_width"],
        num_hidden_layers=options["depth"], num_attention_heads=options["heads"],
        num_key_value_heads=options["kv_heads"], vocab_size=options["vocab"],
        rms_norm_eps=1e-6 if qwen else 1e-5, use_cache=False, bos_token_id=0, eos_token_id=1,
        tie_word_embeddings=name not in UNTIED,
        max_position_embeddings=131072)
    if int(library.__version__.split(".")[0]) >= 5:
        sizes["rope_parameters"] = {"rope_type": "default", **(scaling or {}),
                                    "rope_theta": theta}
    else:
        sizes.update(rope_theta=theta, **({"rope_scaling": scaling} if scaling else {}))
    config = (library.Qwen2Config if qwen else library.LlamaConfig)(**sizes)
    body = library.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return Scored(body.float(), hugging_face_scores, language_loss)


def make_reference_llama(name, options):
    """The implementation of the tests, which is slow: good to compare losses on a CPU with."""
    if torch.empty(0).device.type == "cuda":
        transformers(name)  # says that it is missing
    folder = pathlib.Path(__file__).resolve().parents[2] / "tests/fixtures"
    sys.path.insert(0, str(folder))
    import llama_reference

    config = llama_reference.CONFIGS[name].resized(
        layers=options["depth"], hidden=options["width"], intermediate=options["mlp_width"],
        heads=options["heads"], kv_heads=options["kv_heads"], vocab=options["vocab"])
    body = llama_reference.Llama(config)
    for parameter in body.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return Scored(body, lambda model, tokens: model(tokens), language_loss)


def language_blocks(module):
    """Modules that are checkpointed, as (parent, name)."""
    if isinstance(module, Gpt2):
        blocks = module.blocks
    elif hasattr(module.body, "bert"):
        blocks = module.body.bert.encoder.layer
    else:
        blocks = module.body.model.layers
    return [(blocks, name) for name, _ in blocks.named_children()]


MAKERS = {
    "bert": make_bert, "gpt2": make_gpt2, "llama": make_llama, "qwen2.5": make_llama,
}
