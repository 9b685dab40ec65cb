#!/usr/bin/env python3
"""Tests plug-ins of the command, and models with options of their own.

Usage: plugin_test.py REPRISE FORECAST BAD BROKEN1 BROKEN2 BROKEN3, the command and shared
libraries: examples/plugin, bad_plugin.cpp and broken_plugin.cpp.
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

reprise, forecast, bad, undefined, no_entry, layout = sys.argv[1:7]
device = "cpu"  # where a resumed run has the same bytes
small = ["--model", "forecast", "--depth", "2", "--width", "4", "--batch", "16",
         "--workers", "1", "--no-eval", "--device", device]
failures = 0


def fail(text):
    global failures
    failures += 1
    print("FAILED:", text)


def run(status, *words, says=(), lacks=(), **environment):
    """Runs the command; checks its status and that each text of `says` is printed."""
    done = subprocess.run([reprise, *map(str, words)], capture_output=True, text=True,
                          env={**os.environ, **environment})
    out = done.stdout + done.stderr
    shown = f"{' '.join(map(str, words))}\n{out[-1500:]}"
    if done.returncode != status:
        fail(f"status {done.returncode}, expected {status}: {shown}")
    flat = " ".join(out.split())
    for text in [says] if isinstance(says, str) else says:
        if text not in flat:
            fail(f"no '{text}': {shown}")
    for text in lacks:
        if text in flat:
            fail(f"'{text}': {shown}")
    return done.stdout


def shapes(path):
    """Shapes of the tensors in a safetensors file."""
    data = pathlib.Path(path).read_bytes()
    header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
    return {name: one["shape"] for name, one in header.items() if name != "__metadata__"}


def forged(work, name, old, new):
    """A copy of the plug-in that says it was built with something else."""
    data = pathlib.Path(forecast).read_bytes()
    line = data[data.index(name):]
    line = line[:line.index(b"\n")]
    if old not in line or len(old) != len(new):
        fail(f"cannot forge {line}")
    path = work / "forged.so"
    path.write_bytes(data.replace(line, line.replace(old, new, 1)))
    return path


def test_training(work):
    plugin = ["--plugin", os.path.relpath(forecast)]
    run(0, "train", *plugin, "--help",
        says=("causal filters that continue a signal", "Options of forecast:",
              "--taps INT", "Number of taps per filter (default 3)", "--gate"))
    five = [*plugin, *small, "--taps", "5"]
    run(0, "train", *five, "--steps", 6, "--out", work / "whole",
        "--export", work / "whole.safetensors")
    if shapes(work / "whole.safetensors")["filter0.conv.weight"] != [4, 4, 5]:
        fail("--taps 5 gave other filters")
    config = json.loads((work / "whole/config.json").read_text())
    if (config["taps"], config["gate"]) != (5, False):
        fail(f"taps {config['taps']}, gate {config['gate']} in config.json")
    if not os.path.isabs(config["plugin"]):
        fail(f"plugin {config['plugin']} in config.json")

    # A run continues with the plug-in that it names.
    run(0, "train", *five, "--steps", 3, "--out", work / "part")
    run(2, "train", "--resume", work / "part", "--taps", 3, says="taps was 5, now 3")
    run(0, "train", "--resume", work / "part", "--steps", 6,
        "--export", work / "part.safetensors")
    if ((work / "part.safetensors").read_bytes() !=
            (work / "whole.safetensors").read_bytes()):
        fail("resuming gave other weights")

    # The plug-in has moved.
    moved = work / "moved.so"
    shutil.copy(forecast, moved)
    text = (work / "part/config.json").read_text()
    gone = text.replace(config["plugin"], str(work / "gone.so"))
    (work / "part/config.json").write_text(gone)
    run(2, "train", "--resume", work / "part",
        says=("gone.so: No such file", "was trained with it: give another path with --plugin"))
    run(0, "launch", "-n", 2, "--", "train", "--resume", work / "part", "--steps", 7,
        "--plugin", moved)
    if json.loads((work / "part/config.json").read_text())["plugin"] != str(moved):
        fail("config.json has the old path")
    run(0, "launch", "--plugin", moved, "-n", 2, "--", "train", *small, "--steps", 1,
        "--out", work / "ranks")
    if json.loads((work / "ranks/config.json").read_text())["plugin"] != str(moved):
        fail("ranks did not record the plug-in")


def test_commands(work):
    plugin = ["--plugin", forecast]
    run(0, "plan", *plugin, "--model", "forecast", "--depth", 2, "--width", 4, "--taps", 2,
        "--global-batch", 8, "--precision", "fp32", "--memory", "64MiB", "--device", device)
    run(0, "profile", *plugin, *small[:-3], "--device", device, "--taps", 2)
    run(0, "verify", *plugin, "--model", "forecast", "--depth", 2, "--width", 4, "--gate",
        "--recompute", "all", "--device", device, says="same")
    (work / "study.yaml").write_text(
        "title: Taps\nviews: [grid]\n"
        "shared: {depth: 1, width: 4, steps: 2, workers: 1}\n"
        "runs:\n  - {model: forecast, taps: [3, 5], gate: [true, false], batch: [4]}\n")
    run(0, "study", *plugin, work / "study.yaml", "--out", work / "study", "--only",
        "gate=true", "--device", device, "--no-estimate")
    lines = (work / "study/results.jsonl").read_text().splitlines()
    cases = [one["case"] for one in map(json.loads, lines)
             if one.get("status") == "done"]
    if sorted(one["taps"] for one in cases) != [3, 5] or not all(
            one["gate"] is True for one in cases):
        fail(f"results of the study: {lines}")
    if not (work / "study/report.html").exists():
        fail("the study has no report")
    run(2, "study", work / "study.yaml", "--dry-run", "--no-estimate", says="taps")
    run(2, "study", *plugin, work / "study.yaml", "--dry-run", "--set", "tapps=3",
        says="did you mean taps?")
    run(2, "study", *plugin, "--dry-run", "--set", "taps=99", work / "study.yaml",
        says="expected a whole number from 1 to 64, got '99'")


def test_options():
    plugin = ["--plugin", forecast]
    nothing = ["--steps", 1, "--out", "none"]
    run(2, "train", *plugin, *small, *nothing, "--tapss", 3, says="did you mean --taps?")
    run(2, "train", *small, *nothing, "--taps", 3, says="unknown flag --taps")
    run(2, "train", *plugin, *small, *nothing, "--taps", 65,
        says="expected a whole number from 1 to 64, got '65'")
    run(2, "train", *plugin, "--model", "mlp", *nothing, "--taps", 3,
        says="--model mlp: has no option taps")
    run(0, "train", *plugin, "--plugin", bad, "--help", REPRISE_BAD_PLUGIN="other",
        says=("Options of forecast, other:", "(default 3 for forecast, 7 for other)"))
    for kind, text in (
            ("field", "its option batch has the name of a flag of train"),
            ("flag", "an option of a model has the name of a flag")):
        run(2, "train", *plugin, "--plugin", bad, "--help", REPRISE_BAD_PLUGIN=kind,
            says=text)


def test_refusals(work):
    def refused(path, text, **environment):
        run(2, "train", "--plugin", path, "--help", says=("reprise: --plugin: ", text),
            lacks=("causal filters",), **environment)

    for name, old, new in ((b"Reprise: ", b".", b"9"), (b"LibTorch: ", b".", b"9"),
                           (b"standard library: ", b"lib", b"bil"),
                           (b"C++ ABI: ", b"1", b"7"), (b"sanitizer: ", b": ", b":!"),
                           (b"reprise plug-in, form: ", b"1", b"2")):
        path = forged(work, name, old, new)
        refused(path, f"{path} was built with " + name.decode().split(":")[0])
    refused(work / "missing.so", "missing.so: No such file or directory")
    refused(work, "is a directory")
    (work / "text.so").write_text("no library")
    refused(work / "text.so", "is no plug-in of Reprise")
    (work / "shifted.so").write_bytes(bytes(64) + pathlib.Path(forecast).read_bytes())
    refused(work / "shifted.so", "invalid ELF header")
    refused(undefined, "it needs reprise::no_such_variable, which neither")
    refused(no_entry, "has no symbol reprise_plugin")
    refused(layout, "was built with other headers of Reprise")
    refused(bad, "no licence", REPRISE_BAD_PLUGIN="throws")
    refused(bad, "threw no std::exception", REPRISE_BAD_PLUGIN="throws-int")
    refused(bad, "neither a model nor a dataset", REPRISE_BAD_PLUGIN="nothing")

    twin = work / "twin.so"
    shutil.copy(forecast, twin)
    run(2, "train", "--plugin", forecast, "--plugin", twin, "--help",
        says="there is a model 'forecast' already")
    run(2, "train", "--plugin", forecast, "--plugin", os.path.relpath(forecast), "--help",
        says="is given twice")
    run(2, "train", "--plugin", says="--plugin: expected a value")
    run(2, "train", "--plugin", "", says="expected a path")
    run(2, "devices", "--plugin", forecast, says="unknown flag --plugin for devices")


with tempfile.TemporaryDirectory() as folder:
    where = pathlib.Path(folder).resolve()
    test_training(where)
    test_commands(where)
    test_options()
    test_refusals(where)
print(f"plugin_test: {failures} failures")
sys.exit(1 if failures else 0)
