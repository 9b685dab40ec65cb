#!/usr/bin/env bash
# Tests `reprise train`: summary, comparison, saved runs and errors.
set -u
. "$(dirname "$0")/expect.sh"

small=(--model mlp --depth 2 --width 32 --data random --random-samples 64
  --batch 8 --accumulate 2 --device "$device" --workers 1)

expect 0 train --help
has out "vit-b-16"
has out "--recompute"
has out "--graph"
has out "reprise-runs/MODEL-DATE-TIME"

# --- a run, its files, its summary, a comparison
expect 0 train "${small[@]}" --out "$work/a" --tensorboard --export "$work/a.safetensors"
has out "Samples/second"
has out "Peak memory"
has out "activations"
has err "mlp, "
has err "saved"
for file in config.json metrics.jsonl summary.json tensorboard; do
  [ -e "$work/a/$file" ] || fail "no $file in the run directory"
done
expect 0 train "${small[@]}" --out "$work/b" --recompute all --format json
python3 - "$work/out" "$work/b/summary.json" <<'PY' || fail "the JSON differs from the documentation"
import json, sys
shown, kept = (json.load(open(path)) for path in sys.argv[1:])
assert shown == kept
assert shown["recompute"] == "all" and shown["global_batch"] == 16
assert shown["steps"] == 4
assert sum(shown["memory"].values()) == shown["window_peak_bytes"]
assert shown["peak_at"]["phase"] in ("forward", "backward", "update")
PY
expect 0 train --compare "$work/a/summary.json" "$work/b/summary.json"
has out BEFORE
has out AFTER
has out "×"
expect 2 train --compare "$work/a/summary.json" "$work/nowhere.json"
has err "nowhere.json"

# --- a memory budget
planned=(--model mlp --depth 2 --width 32 --data random --random-samples 64
  --global-batch 16 --device "$device" --workers 1)
expect 0 train "${planned[@]}" --memory 4GiB --out "$work/planned" --format json
python3 - "$work/out" "$work/planned/config.json" <<'PY' || fail "the plan differs from the documentation"
import json, sys
summary, config = (json.load(open(path)) for path in sys.argv[1:])
assert config["recompute"] == "optimal" and config["memory"] == 4 << 30
assert config["batch"] == summary["micro_batch"] > 0
assert config["accumulate"] == summary["accumulate"] > 0
assert set(summary["predicted"]) == {"peak_bytes", "step_ms"}
assert summary["replans"] == 0 and summary["limit_bytes"] == 4 << 30
PY
expect 0 train --resume "$work/planned" --epochs 2
has err "continues after update 4 of 8"
has out "predicted"
expect 0 train "${planned[@]}" --memory 4GiB --recompute all --out none
lacks out "predicted"
expect 2 train "${planned[@]}" --recompute optimal --out "$work/c"
has err "optimal needs --memory"
[ ! -e "$work/c" ] || fail "a rejected run created a directory"

# --- saving and loading weights
expect 0 train "${small[@]}" --weights "$work/a.safetensors" --out none --steps 1
expect 2 train "${small[@]}" --width 16 --weights "$work/a.safetensors" --out "$work/c"
has err "shape"
[ ! -e "$work/c" ] || fail "a rejected run created a directory"
head -c 200 "$work/a.safetensors" >"$work/cut.safetensors"
expect 2 train "${small[@]}" --weights "$work/cut.safetensors" --out "$work/c"
has err "cut.safetensors"

# --- resuming
expect 0 train --resume "$work/a" --epochs 2
has err "continues after update 4 of 8"
expect 2 train --resume "$work/a" --model cnn-basic
has err "another training: model was"
expect 2 train --resume "$work/a" --clip 3
has err "clip was"
expect 2 train --resume "$work/nowhere"
has err "holds no run"
expect 2 train "${small[@]}" --out "$work/a"
has err "holds a run already"

# --- a directory that cannot be created, and a full disk
: >"$work/x"
expect 2 train "${small[@]}" --out "$work/x/run"
has err "cannot make the directory"
# A limit on the file size simulates a full disk: the first states fit, and the training
# continues without saving and reports it.
expect 0 train "${small[@]}" --out "$work/full" --steps 2
before=$(ls "$work"/full/state-*)
last="train on a full disk"
(
  trap '' XFSZ
  ulimit -f 8
  exec "$reprise" train --resume "$work/full" --steps 6 --save-every 1
) >"$work/out" 2>"$work/err" && fail "exit status 0, expected 1"
has err "not saved: "
has err "File too large"
[ "$(ls "$work"/full/state-*)" = "$before" ] || fail "the last valid state was lost"
expect 0 train --resume "$work/full" --steps 6
has err "continues after update 2 of 6"

# --- SIGINT saves a state and exits with status 130; output that cannot be written
: >"$work/err"
"$reprise" train "${small[@]}" --epochs 100000 --out "$work/int" >"$work/out" 2>"$work/err" &
pid=$!
last="an interrupted training"
for _ in $(seq 200); do grep -q "step" "$work/err" && break; sleep 0.05; done
kill -INT $pid
wait $pid
status=$?
[ $status = 130 ] || fail "exit status $status, expected 130"
has err "stopped; go on with: reprise train --resume $work/int"
ls "$work"/int/state-* >/dev/null || fail "SIGINT did not save a state"
last="a summary into a full disk"
"$reprise" train "${small[@]}" --steps 1 --out none >/dev/full 2>"$work/err"
[ $? = 1 ] || fail "expected exit status 1"
has err "cannot write to standard output"
# With --format json, usage errors are JSON objects too.
expect 2 train "${small[@]}" --recompute every:99 --out none --format json
python3 -c 'import json, sys; e = json.load(open(sys.argv[1])); assert "every:99" in e["error"] and not e["out_of_memory"]' "$work/out" || fail "the error is not reported as JSON"

# --- invalid input is reported in one line
one_line() { [ "$(grep -c . "$work/err")" -le 2 ] || fail "more than one line"; }
expect 2 train --model gtp2
has err "gpt2"
one_line
expect 2 train --model cnn-basic --image-size 100
has err "image"
one_line
expect 2 train --batch 0
has err "--batch"
expect 2 train "${small[@]}" --precision fp8
has err "fp32, bf16, fp16"
expect 2 train "${small[@]}" --graph yes
has err "auto, on, off"
expect 2 train "${small[@]}" --device cpu --graph on
has err "--graph: on needs a CUDA device"
one_line
expect 2 train "${small[@]}" --optimizer adamm
has err "adamw"
expect 2 train "${small[@]}" --data "$work/nothing-images-idx3-ubyte"
has err "nothing-images-idx3-ubyte"
one_line
printf 'not an idx file at all' >"$work/bad-images-idx3-ubyte"
expect 2 train --model cnn-basic --data "$work/bad-images-idx3-ubyte" --out "$work/c"
has err "bad-images-idx3-ubyte"
one_line
[ ! -e "$work/c" ] || fail "a rejected run created a directory"
expect 2 train --recompte sqrt
has err "did you mean --recompute?"
expect 2 train "${small[@]}" --recompute every:99
has err "between 1 and"

finish "reprise train"
