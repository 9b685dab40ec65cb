"""Reads and writes safetensors with NumPy alone."""
import json
import struct

import numpy
import torch

TYPES = {"F32": numpy.dtype("<f4"), "I64": numpy.dtype("<i8")}


def write_tensors(path, tensors):
    header, offset = {}, 0
    for name, tensor in tensors.items():
        kind = {torch.float32: "F32", torch.int64: "I64"}[tensor.dtype]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": kind, "shape": list(tensor.shape),
                        "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(memoryview(tensor.detach().cpu().contiguous().numpy().reshape(-1)))


def read_tensors(path):
    """Tensors of a file by name. They are read from the file when they are used."""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        start = file.tell()
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        kind, shape = TYPES[entry["dtype"]], tuple(entry["shape"])
        # Private to this process, since tensors must be writable.
        values = numpy.memmap(path, kind, "c", start + entry["data_offsets"][0],
                              (int(numpy.prod(shape)),))
        tensors[name] = torch.from_numpy(values).reshape(shape)
    return tensors
