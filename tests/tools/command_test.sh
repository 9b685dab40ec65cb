#!/usr/bin/env bash
# Runs the command and checks its output, errors and exit status.
set -u
. "$(dirname "$0")/expect.sh"

expect 0 --help
has out verify
has out "Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted"
expect 0 --version
has out LibTorch
expect 0 verify --help
has out --recompute
has out tiny-transformer
has out "revolve:S"

expect 2
has err "expected a subcommand: train"
expect 2 verfy
has err "did you mean verify?"
expect 2 verify --recompte all
has err "did you mean --recompute?"
expect 2 verify --model tiny-mpl
has err "did you mean tiny-mlp?"
expect 2 verify --recompute every:99
has err "between 1 and"
expect 2 verify --recompute some
has err "expected one of none, all"
expect 2 verify --device nowhere
has err "expected cpu, cuda"
expect 2 verify --device cuda:99
has err "CUDA devices"
expect 2 verify --batch 0
expect 2 verify --format xml

expect 0 verify --device "$device" --model tiny-mlp --recompute none,sqrt
has out "tiny-mlp"
has out "same"
lacks out DIFFERENT
has err "verify tiny-mlp sqrt: same"
lacks out "verify tiny-mlp"

expect 0 verify --device "$device" --model gpt2 --depth 3 --width 16 --heads 2 --vocab 50 \
  --seq 12 --recompute all,revolve:1
has out "gpt2 "
lacks out DIFFERENT
expect 2 verify --model resnet18 --heads 3
has err "heads"
expect 2 verify --model tiny-mlp --depth 3
has err "sizes such as --depth are for train's models, got tiny-mlp"
expect 2 verify --depth 3
has err "sizes such as --depth are for train's models"
expect 2 verify --model resnet5
has err "did you mean resnet50?"
expect 2 verify --model resnet18 --nested
has err "nested"

expect 0 verify --device "$device" --model tiny-cnn --recompute all --nested --format json
python3 - "$work/out" <<'PY' || fail "the JSON differs from the documentation"
import json, sys
data = json.load(open(sys.argv[1]))
assert data["same"] is True
(result,) = data["results"]
assert result["model"] == "tiny-cnn" and result["recompute"] == "all"
assert result["runs"] == result["simulated_runs"] == [2, 2, 2, 2, 2, 1]
assert set(result["compared"]) == {"loss", "gradients", "buffers", "rng", "parameters"}
assert result["compared"]["gradients"]["tensors"] == 54
PY

expect 0 devices
has out "observable"
has out cpu
has out utilisation
expect 2 devices --format xml
expect 0 devices --format json
python3 - "$work/out" <<'PY' || fail "the JSON differs from the documentation"
import json, sys
cpu = json.load(open(sys.argv[1]))["devices"][0]
assert cpu["device"] == cpu["kind"] == "cpu"
assert cpu["memory_bytes"] > 1 << 20 and cpu["cores"] >= 1 and cpu["driver"] is None
assert cpu["visible"]["memory"] is True
assert all(cpu["reasons"].get(k) for k, seen in cpu["visible"].items() if not seen)
PY

finish "the command"
