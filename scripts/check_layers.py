"""Fails where an include points up the layers, where LibTorch's version is asked for
outside torch/, or where reprise.h lacks a header. The order is that of docs/design.md."""
import pathlib
import re
import sys

LAYERS = [
    "torch",
    "lean",
    "memory",
    "observe",
    "accumulate",
    "recompute",
    "data",
    "models",
    "verify",
    "distributed",
    "plan",
    "train",
    "study",
    "report",
]
RANK = {name: rank for rank, name in enumerate(LAYERS)}
INCLUDE = re.compile(r'^\s*#\s*include\s+[<"]reprise/(\w+)/', re.MULTILINE)
VERSION = re.compile(r"\bTORCH_VERSION_M(AJOR|INOR)\b")

problems = []
root = pathlib.Path(__file__).resolve().parent.parent
for folder in ("include/reprise", "src"):
    for path in sorted((root / folder).rglob("*")):
        if path.suffix not in (".h", ".cpp", ".cu"):
            continue
        layer = path.relative_to(root / folder).parts[0]
        if layer not in RANK:
            if path.name != "reprise.h":
                problems.append(f"{path}: '{layer}' is no layer")
            continue
        text = path.read_text()
        for used in INCLUDE.findall(text):
            if RANK.get(used, 99) > RANK[layer]:
                problems.append(f"{path}: {layer}/ includes {used}/, above it")
        if layer != "torch" and VERSION.search(text):
            problems.append(f"{path}: asks for LibTorch's version")
public = root / "include"
everything = (public / "reprise/reprise.h").read_text()
for path in sorted(public.rglob("*.h")):
    name = path.relative_to(public).as_posix()
    if name == "reprise/reprise.h" or name.startswith("reprise/torch/"):
        continue
    if f"#include <{name}>" not in everything:
        problems.append(f"{public}/reprise/reprise.h: lacks {name}")
for problem in problems:
    print(problem, file=sys.stderr)
sys.exit(1 if problems else 0)
