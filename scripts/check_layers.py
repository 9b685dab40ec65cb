"""Checks that the sources follow the layers of docs/design.md.

Usage: check_layers.py [ROOT]. Fails if
- an include points up the layers, with or without a relative path;
- a public header includes a private one;
- the command or an example includes a private header (base/ excepted for the command);
- a model includes a private header of a folder other than base/ and compat/, so that models
  need no more than programs with models of their own;
- LibTorch's version is tested outside of compat/;
- base/ uses LibTorch;
- a public header is missing from the umbrella header of its component.
"""
import pathlib
import re
import sys

# From the bottom up; a folder may include the folders before it.
LAYERS = {
    "base": "core",
    "compat": "core",
    "ops": "core",
    "memory": "core",
    "observe": "study",
    "accumulate": "core",
    "recompute": "core",
    "plan": "core",
    "verify": "core",
    "data": "train",
    "models": "train",
    "distributed": "train",
    "train": "train",
    "study": "study",
    "report": "study",
}
# Headers that programs include themselves, because of what they include.
SEPARATE = ("reprise/data/torch_data.h",)
# Folders whose private headers a folder may include; other folders: all below them.
PRIVATE_HEADERS = {"models": {"models", "base", "compat"}}
COMPONENTS = ["core", "train", "study"]
RANK = {name: rank for rank, name in enumerate(LAYERS)}
INCLUDE = re.compile(r'^\s*#\s*include\s+(<([^>]+)>|"([^"]+)")', re.MULTILINE)
VERSION = re.compile(r"\bTORCH_VERSION_M(AJOR|INOR)\b")
LIBTORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")
DEFAULT_ROOT = pathlib.Path(__file__).parent.parent
ROOT = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_ROOT).resolve()
PUBLIC = ROOT / "include"
PRIVATE = ROOT / "src"


def resolve(path, angled, quoted):
    """The file of this project that an include names; None for other projects."""
    if angled:
        candidates = [PUBLIC / angled]
    else:
        candidates = [path.parent / quoted, PRIVATE / quoted, PUBLIC / quoted]
    for candidate in candidates:
        candidate = candidate.resolve()
        if candidate.is_file() and ROOT in candidate.parents:
            return candidate
    return None


def layer_of(path):
    """The folder of a library file and whether it is public; (None, ...) for other files."""
    for root, public in ((PUBLIC / "reprise", True), (PRIVATE, False)):
        if root in path.parents:
            parts = path.relative_to(root).parts
            return (parts[0] if len(parts) > 1 else None), public
    return None, False


def check_library_file(path):
    layer, public = layer_of(path)
    text = path.read_text()
    if layer is None:  # an umbrella header, or version.h
        return
    if layer not in RANK:
        yield f"'{layer}' is no layer"
        return
    for match in INCLUDE.finditer(text):
        used = resolve(path, match[2], match[3])
        if layer == "base" and LIBTORCH.match(match[2] or ""):
            yield f"base/ includes {match[1]}"
        if used is None:
            if match[3]:
                yield f"cannot find {match[1]}"
            continue
        other, other_public = layer_of(used)
        if other is None and used.name != "version.h":
            yield f"includes {match[1]}, an umbrella header"
        if RANK.get(other, -1) > RANK[layer]:
            yield f"{layer}/ includes {other}/, above it"
        elif not other_public and other not in PRIVATE_HEADERS.get(layer, RANK):
            yield f"{layer}/ includes a private header of {other}/, {match[1]}"
        if public and not other_public:
            yield f"public header includes a private one, {match[1]}"
    if layer != "compat" and VERSION.search(text):
        yield "asks for LibTorch's version"


def check_program(path, allowed):
    for match in INCLUDE.finditer(path.read_text()):
        used = resolve(path, match[2], match[3])
        layer, public = layer_of(used) if used else (None, True)
        if layer and not public and layer not in allowed:
            yield f"includes a private header, {match[1]}"


def check_umbrellas():
    for component in COMPONENTS:
        text = (PUBLIC / f"reprise/{component}.h").read_text()
        for path in sorted(PUBLIC.rglob("*.h")):
            layer, _ = layer_of(path)
            name = path.relative_to(PUBLIC).as_posix()
            if name in SEPARATE:
                continue
            if LAYERS.get(layer) == component and f"#include <{name}>" not in text:
                yield f"{PUBLIC}/reprise/{component}.h: lacks {name}"


def main():
    problems = list(check_umbrellas())
    for folder in (PUBLIC, PRIVATE):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".h", ".cpp", ".cu", ".cuh"):
                if "gloo_names" not in path.parts:
                    problems += [f"{path}: {p}" for p in check_library_file(path)]
    for folder, allowed in (("tools", ("base",)), ("examples", ())):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".h", ".cpp"):
                problems += [f"{path}: {p}" for p in check_program(path, allowed)]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
