#!/usr/bin/env python3
"""Tests that scripts/check_layers.py finds each violation in a copy of the tree.

Usage: check_layers_test.py ROOT
"""
import pathlib
import shutil
import subprocess
import sys
import tempfile

# A file, an include that it must not have, and what the script says.
VIOLATIONS = [
    ("tools/reprise/plan_command.cpp", '"train/budget/training_costs.h"', "private header"),
    ("tools/reprise/plan_command.cpp", '"plan/evaluator.h"', "private header"),
    ("tools/reprise/checks.h", '"recompute/stage_checks.h"', "private header"),
    ("src/models/mlp.cpp", '"plan/evaluator.h"', "private header of plan/"),
    ("src/models/layers.h", '"recompute/stage_checks.h"', "private header of recompute/"),
    ("src/models/mlp.cpp", '"train/step/micro_step.h"', "above it"),
    ("src/models/mlp.cpp", "<reprise/train/config.h>", "above it"),
    ("src/plan/planner.cpp", "<reprise/models/model.h>", "above it"),
    ("src/base/bytes.cpp", "<torch/types.h>", "base/ includes"),
    ("include/reprise/models/model.h", '"models/layers.h"', "public header"),
    ("examples/core/main.cpp", '"base/file.h"', "private header"),
]
ALLOWED = [
    ("tools/reprise/plan_command.cpp", '"base/file.h"'),
    ("src/models/mlp.cpp", '"compat/rng.h"'),
    ("src/plan/planner.cpp", '"recompute/stage_checks.h"'),
]


def check(root):
    """Exit status and messages of the script."""
    script = root / "scripts/check_layers.py"
    done = subprocess.run([sys.executable, script, root], capture_output=True, text=True)
    return done.returncode, done.stderr


def main():
    source = pathlib.Path(sys.argv[1]).resolve()
    failures = 0
    with tempfile.TemporaryDirectory() as work:
        root = pathlib.Path(work).resolve()
        for folder in ("include", "src", "tools", "examples", "scripts"):
            shutil.copytree(source / folder, root / folder)
        cases = [(None, None, None)] + VIOLATIONS + [(*one, None) for one in ALLOWED]
        for name, header, message in cases:
            if name:
                path = root / name
                before = path.read_text()
                path.write_text(f"#include {header}\n{before}")
            status, errors = check(root)
            expected = 1 if message else 0
            found = not message or any(
                name in line and message in line for line in errors.splitlines())
            if status != expected or not found:
                failures += 1
                print(f"FAILED: {header} in {name}: status {status}, {errors}")
            if name:
                path.write_text(before)
    print(f"check_layers_test: {len(cases)} cases, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
