"""PyTorch twins of the zoo's models: the same function of the same weights.

A twin is a module that maps a batch to the sum of its losses.
"""
import samples
import torch
import zoo
from tensor_files import read_tensors, write_tensors

import language
import plain
import vision


def family_of(name):
    """The module that has the twin, and the function that makes it."""
    for family in (vision, plain):
        if name in family.MAKERS:
            return family, family.MAKERS[name]
    prefix = max((key for key in language.MAKERS if name.startswith(key)), key=len)
    return language, language.MAKERS[prefix]


def make_twin(name, options, dropout=0.0):
    return family_of(name)[1](name, options, dropout)


def blocks_of(name, twin):
    """The modules to checkpoint, as (parent, name)."""
    family = family_of(name)[0]
    return {vision: vision.vision_blocks, language: language.language_blocks,
            plain: plain.plain_blocks}[family](twin)


def tensors_of(name, twin):
    """Parameters and buffers by the zoo's names, as views of those of the twin."""
    state, seen = {}, set()
    for key, tensor in twin.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape)
        if key.endswith("num_batches_tracked") or (tensor.numel() and place in seen):
            continue  # tied weights occur once
        seen.add(place)
        state[key[len("body."):] if key.startswith("body.") else key] = tensor
    if name.startswith("vit-"):
        return vision.vit_names(state)
    if name.startswith("gpt2"):
        return language.gpt2_names(state)
    return state


def save_weights(name, twin, path):
    write_tensors(path, tensors_of(name, twin))


def load_weights(name, twin, path):
    kept = read_tensors(path)
    own = tensors_of(name, twin)
    if kept.keys() != own.keys():
        raise SystemExit(f"{path} is of another model than {name}: "
                         f"{sorted(kept.keys() ^ own.keys())[:3]}")
    with torch.no_grad():
        for key, tensor in own.items():
            tensor.copy_(kept[key])


def make_batch(name, options, count):
    """The samples of the command's random data, all of them, in the order of their index."""
    task = zoo.MODELS[name].task
    if task == "language":
        return samples.tokens(count, options["seq"], options["vocab"])
    if task == "sequences":
        return samples.sequences(count, options["seq"], options["vocab"], options["classes"])
    return samples.images(count, options["channels"], options["classes"],
                          options["image_size"], task == "pixels")
