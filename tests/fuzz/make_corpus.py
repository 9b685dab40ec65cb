"""Writes the binary inputs of tests/fuzz/corpus, and short texts; see README.md.

    make_corpus.py

The JSON files of profile/, plan/, config/ and summary/ are written by the program itself.
"""
import gzip
import json
import pathlib
import struct

CORPUS = pathlib.Path(__file__).resolve().parent / "corpus"


def write(name, content):
    path = CORPUS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def safetensors(tensors, metadata=None):
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, (kind, shape, content) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape,
                        "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


STATE = {"step": 3, "micro": 0, "total_count": 0.0, "done_count": 0.0, "epoch": 0, "sample": 12,
         "stream": "00ff", "scale": 1.0, "good_updates": 0, "skipped": 0, "samples": 12,
         "train_s": 1.5, "metrics_bytes": 0, "evaluation_due": False, "finished": False}
PIECES = {"parameter.a": {"sizes": [2, 3], "strides": [3, 1], "from": 0}}


def write_tensors():
    floats = struct.pack("<6f", *range(6))
    write("safetensors/types", safetensors(
        {"a": ("F32", [2, 3], floats), "b.c": ("BOOL", [3], b"\0\1\2"), "d": ("BF16", [], b"\0\1"),
         "empty": ("I64", [0, 4], b"")}, {"format": "pt"}))
    write("safetensors/none", safetensors({}))
    write("state/whole", safetensors(
        {"parameter.a": ("F32", [2, 3], floats), "optimizer.step": ("I64", [], struct.pack("<q", 3)),
         "window.loss": ("F64", [], struct.pack("<d", 1))}, {"reprise": json.dumps(STATE)}))
    write("state/pieces", safetensors(
        {"parameter.a": ("F32", [6], floats)},
        {"reprise": json.dumps(STATE), "parts": "1", "pieces": json.dumps(PIECES)}))
    weight_map = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    write("weight-index/three", json.dumps({"metadata": {"total_size": 48},
                                            "weight_map": weight_map}))
    adapter = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "bias": "none",
               "target_modules": ["hidden0"], "use_dora": False, "modules_to_save": None}
    write("adapter/config", json.dumps(adapter))
    write("adapter/text", json.dumps(adapter | {"target_modules": "all-linear"}))
    stage = {"name": "s", "file": "s.pt", "inputs": 2, "outputs": 2, "tensors": {"w": "a"}}
    write("script/one", json.dumps({"version": 1, "name": "m", "dtype": "float32", "inputs": 1,
                                    "stages": [stage]}))


def write_data():
    images = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 3]) + bytes(range(12))
    write("idx/plain", images)
    write("idx/gzip", gzip.compress(images, mtime=0))
    write("text/lines", "To be, or not to be,\nthat is the question:\n\nWhether 'tis nobler\n")
    write("text/utf8", "Größe ×\n")
    write("tokens16/plain", struct.pack("<40H", *range(40)))
    header = struct.pack("<3i", 20240520, 1, 40) + bytes(4 * 253)
    write("tokens16/llmc", header + struct.pack("<40H", *range(40)))
    header = struct.pack("<3i", 20240801, 7, 40) + bytes(4 * 253)
    write("tokens32/llmc", header + struct.pack("<40I", *range(40)))
    write("tokens32/plain", struct.pack("<40I", *range(40)))


STUDIES = {
    "grid": """title: A grid
question: How does it grow?
views: [grid, steps]
repeats: 2
timeout: 60
shared: {model: mlp, data: random, steps: 2}
runs:
  - batch: [1, 2, 4]
    accumulate: [1, 2]
    at-most: [{of: [batch, accumulate], limit: 4}]
""",
    "variants": """reference: &r {runs: [1, 2.5, true]}
runs:
  - model: mlp
    variants:
      - {label: plain, recompute: none}
      - {label: all, recompute: all}
    at-most:
      - of: [batch]
        by: model
        limits: {mlp: 8}
""",
    "alias": "shared: &s {model: mlp}\nruns:\n  - *s\n  - {<<: *s, batch: 2}\n",
}

RESULTS = [
    {"type": "study", "study": "s", "title": "t", "views": ["grid"], "runs": 1, "file": "runs:"},
    {"type": "run", "id": "0a", "study": "s", "case": {"model": "mlp", "batch": 2},
     "status": "done", "figures": {"peak_bytes": 5, "step_ms": 1.5, "warnings": []},
     "series": {"t_s": [0, 1, 2], "memory_bytes": [1, 2, 3]}, "wall_s": 1.25},
    {"type": "run", "id": "0b", "status": "oom", "reason": "</script>", "figures": None},
]

METRICS = [
    {"update": 1, "loss": 2.5, "lr": 0.1},
    {"update": 1, "eval_loss": 2.25, "eval_accuracy": 0.5},
    {"update": 2, "loss": "nan", "lr": 0.1},
]

# Requests of a rank: a length, the operation, the length of the key, the key, and a value.
REQUESTS = [(0, b"key", b"value"), (1, b"key", bytes(8)), (1, b"absent", struct.pack("<q", 1)),
            (2, b"number", struct.pack("<q", -5)), (3, b"key", b""), (4, b"", b"")]

FLAGS = ["batch 32", "lr 0.001", "dropout 0.1", "memory 8GiB", "recompute every:2", "seed 7",
         "precision bf16", "tf32 true", "device cuda:0", "host-memory 64GiB", "data random",
         "recompute K0 D1 K1 B1 B0", "observe 50", "lora-targets query,value", "epochs 1",
         "bucket 25MiB", "clip 1e3", "lr-schedule cosine", "seconds 10.5", "out x"]


def write_texts():
    for name, text in STUDIES.items():
        write(f"study/{name}", text)
    write("metrics/lines", "".join(json.dumps(line) + "\n" for line in METRICS))
    write("results/lines", "".join(json.dumps(line) + "\n" for line in RESULTS))
    for number, text in enumerate(["K0 K1 B1 B0", "D0 D1 K0 K1 B1 B0", "I0 K1 B1 K0 B0",
                                   "K0.1 K1 F0 B1 B0", "every:2", "checkpoints:3", "revolve:2",
                                   "sqrt", "none"]):
        write(f"schedule/{number}", text)
    for number, text in enumerate(["8GiB", "8000MB", "1.5 TiB", "64", "8G", "1e3kb", "0"]):
        write(f"bytes/{number}", text)
    for number, text in enumerate(FLAGS):
        write(f"flag/{number:02}", text)


def write_messages():
    requests = []
    for operation, key, value in REQUESTS:
        body = struct.pack("<BH", operation, len(key)) + key + value
        requests.append(struct.pack("<I", len(body)) + body)
    write("store/requests", b"".join(requests))
    write("store/waits", requests[2])
    write("store/hello", b"RPRANK01" + bytes(range(32)) + bytes(32))


if __name__ == "__main__":
    write_tensors()
    write_data()
    write_texts()
    write_messages()
