#!/usr/bin/env bash
# Tests `reprise plan` and `reprise profile`.
set -u
. "$(dirname "$0")/expect.sh"
export XDG_CACHE_HOME=$work/cache

small=(--model mlp --depth 3 --width 32 --data random --random-samples 64
  --device "$device" --workers 1)
one_line() { [ "$(grep -c . "$work/err")" -le 2 ] || fail "more than one line"; }

# --- plan: a sufficient budget
expect 0 plan --help
has out "--largest"
has out "--memory"
expect 0 plan "${small[@]}" --global-batch 16 --memory 1GiB --precision fp32 --measure
has out "= 16 samples per update, fp32"
has out "of the budget of 1.00 GiB"
has out "measured   peak"
has out "Memory at the peak"
has out "The chain of"
has err "measuring"
lacks out "measuring"
expect 0 plan "${small[@]}" --global-batch 16 --memory 1GiB --format json
python3 - "$work/out" <<'PY' || fail "the JSON differs from the documentation"
import json, sys
plan = json.load(open(sys.argv[1]))
assert plan["feasible"] is True and plan["budget"] == 2**30
assert plan["global_batch"] == 16
rest = plan["micro_batch"] * (plan["accumulate"] - 1) + plan["last_micro_batch"]
assert rest == 16
assert 0 < plan["predicted"]["peak_bytes"] <= plan["budget"]
assert plan["predicted"]["step_ms"] > 0 and plan["predicted"]["samples_per_s"] > 0
assert plan["precision"] in ("fp32", "bf16")
assert sum(plan["memory"].values()) == plan["predicted"]["peak_bytes"]
assert plan["peak_at"]["phase"] in ("forward", "recompute", "backward", "update",
                                    "preparation of a batch")
for key in ("recompute", "schedule", "alternatives", "frontier", "references",
            "peak_reductions", "smallest_bytes", "stages"):
    assert key in plan, key
assert "measured" not in plan
PY

# --- given values are kept
expect 0 plan "${small[@]}" --batch 4 --accumulate 2 --recompute all --precision fp32 \
  --memory 1GiB --format json
python3 - "$work/out" <<'PY' || fail "a given size or strategy was changed"
import json, sys
plan = json.load(open(sys.argv[1]))
assert (plan["micro_batch"], plan["accumulate"], plan["global_batch"]) == (4, 2, 8)
assert plan["recompute"] == "all" and plan["precision"] == "fp32"
PY

# --- a budget that is too small
expect 1 plan "${small[@]}" --global-batch 16 --memory 1KiB
has out "Nothing fits into 1.00 KiB (1024 bytes): the smallest plan needs"
expect 1 plan "${small[@]}" --global-batch 16 --memory 1KiB --format json
python3 - "$work/out" <<'PY' || fail "the JSON differs from the documentation"
import json, sys
plan = json.load(open(sys.argv[1]))
assert plan["feasible"] is False and plan["smallest_bytes"] > 1024
PY

# --- the largest batch
memory=2MiB
[ "$device" = cpu ] || memory=128MiB  # includes cuBLAS workspaces
expect 0 plan "${small[@]}" --largest batch --memory $memory --precision fp32 --format json
python3 - "$work/out" ${memory%MiB} <<'PY' || fail "the JSON differs from the documentation"
import json, sys
largest = json.load(open(sys.argv[1]))
assert largest["axis"] == "batch"
assert largest["value"] >= largest["plain"] > 0
assert largest["peak_bytes"] <= int(sys.argv[2]) * 2**20
PY

# --- invalid input is reported in one line
expect 2 plan --memory lots
has err "8GiB"
one_line
expect 2 plan "${small[@]}" --memory 0
one_line
expect 2 plan --model gtp2 --memory 1GiB
has err "gpt2"
one_line
expect 2 plan "${small[@]}" --precision fp8 --memory 1GiB
has err "fp32, bf16, fp16"
one_line
expect 2 plan "${small[@]}" --recompute some --memory 1GiB
has err "none, all"
one_line
expect 0 plan "${small[@]}" --global-batch 16 --memory 1GiB --precision fp32 --recompute auto
has out "= 16 samples per update, fp32"
expect 2 plan "${small[@]}" --largest width
one_line
expect 2 plan --device nowhere
has err "expected cpu, cuda"
expect 2 plan --memry 1GiB
has err "did you mean --memory?"
expect 2 plan --format xml
expect 2 plan --margin 1.5
has err "--margin"

# --- profile
expect 0 profile "${small[@]}" --batch 4 --accumulate 2 --recompute all
has out "optimizer state"
has out "other micro-batches"
has out "together"
has out "The peak of a window"
has out "step: train takes"
expect 0 profile "${small[@]}" --batch 4 --format json
python3 - "$work/out" <<'PY' || fail "the JSON differs from the documentation"
import json, sys
profile = json.load(open(sys.argv[1]))
phases = profile["phases"]
assert [p["name"] for p in phases] == ["model", "data", "optimizer state", "batch",
    "forward", "last stage", "backward", "update"]
assert sum(p["increment_bytes"] for p in phases) == (
    phases[-1]["after_bytes"] - phases[0]["before_bytes"])
assert sum(s["kept_bytes"] for s in profile["stages"]) == profile["kept_bytes"]
assert sum(profile["memory"].values()) == profile["peak_bytes"]
window = [p["ms"] for p in phases[3:]]
assert abs(sum(window) - profile["phases_ms"]) < 1e-6 * sum(window)
assert profile["step_ms"] > 0
assert profile["graph"] == ("off" if profile["device"] == "cpu" else "on")
PY
expect 0 profile "${small[@]}" --batch 4 --graph off --format json
has out '"graph": "off"'
expect 2 profile --model gtp2
has err "gpt2"
expect 2 profile --batch 0
expect 2 profile "${small[@]}" --optimizer adamm
has err "adamw"

finish "reprise plan and profile"
