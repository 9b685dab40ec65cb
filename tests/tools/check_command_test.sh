#!/usr/bin/env bash
# Tests `reprise check`, and what --resume does with damaged runs.
set -u
. "$(dirname "$0")/expect.sh"

train=(train --model mlp --depth 1 --width 8 --batch 4 --workers 1 --threads 1
  --device cpu --no-eval --save-every 2)
random=(--data random --random-samples 16)
# flip FILE POSITION: flips a bit; a negative position counts from the end.
flip() {
  python3 - "$1" "$2" <<'PY'
import sys
path, at = sys.argv[1], int(sys.argv[2])
data = bytearray(open(path, "rb").read())
data[at] ^= 4
open(path, "wb").write(data)
PY
}
expect 0 check --help
has out "--repair"
expect 2 check "$work"
has err "holds no run"
expect 2 check
expect 0 "${train[@]}" "${random[@]}" --steps 4 --keep 3 --out "$work/run"
cp -r "$work/run" "$work/whole"

# --- whole
expect 0 check "$work/run"
has out "whole, with checksums"
has out "continues from state-0000000004"
expect 0 check "$work/run" --format json
python3 - "$work/out" <<'PY' || fail "the JSON differs from the documentation"
import json, sys
result = json.load(open(sys.argv[1]))
assert result["whole"] and result["newest"].startswith("state-0000000004")
kinds = [file["kind"] for file in result["files"]]
assert kinds == ["state", "state", "config", "metrics", "summary"], kinds
assert all(file["whole"] and file["problem"] is None for file in result["files"])
PY

# --- a flipped bit: reported, set aside, and the one before is used
newest=$(ls "$work"/run/state-* | tail -1)
flip "$newest" -10
expect 1 check "$work/run"
has out "NOT WHOLE"
has out "does not fit its checksum"
has out "continues from state-0000000002"
[ -e "$newest" ] || fail "check changed something"
expect 0 check "$work/run" --repair
has out "set aside"
[ -e "$newest.broken" ] || fail "not set aside"
expect 0 check "$work/run"
expect 0 train --resume "$work/run" --steps 6
has err "continues after update 2 of 6"

# --- the same without check
rm -r "$work/run"
cp -r "$work/whole" "$work/run"
flip "$newest" -10
expect 0 train --resume "$work/run" --steps 6
has err "set aside as state-0000000004-000000.safetensors.broken"
has err "does not fit its checksum"
has err "continues after update 2 of 6"

# --- all states are cut off: never from the beginning, and nothing is removed
rm -r "$work/run"
cp -r "$work/whole" "$work/run"
truncate -s -1 "$work"/run/state-*
for _ in 1 2; do
  expect 1 train --resume "$work/run"
  has err "holds no whole state"
  lacks err "saved"
done
[ "$(ls "$work"/run/state-*.broken | wc -l)" = 2 ] || fail "expected two files set aside"
expect 0 check "$work/run"
has out "no whole state"

# --- a run that had ended keeps its summary
expect 0 train --resume "$work/whole"
cmp -s "$work/whole/summary.json" <(cat "$work/whole/summary.json") || fail "no summary"
python3 - "$work/whole/summary.json" <<'PY' || fail "the summary was overwritten"
import json, sys
summary = json.load(open(sys.argv[1]))
assert summary["loss"] is not None and summary["samples_per_s"] > 0
PY
# Also if it was never written.
rm "$work/whole/summary.json"
expect 0 train --resume "$work/whole"
python3 - "$work/whole/summary.json" "$work/whole/metrics.jsonl" <<'PY' || fail "the loss is missing"
import json, sys
last = json.loads(open(sys.argv[2]).read().splitlines()[-1])
assert json.load(open(sys.argv[1]))["loss"] == last["loss"]
PY

# --- metrics that are missing do not stop a resume
rm "$work/whole/metrics.jsonl"
expect 1 check "$work/whole"
has out "metrics.jsonl"
expect 0 train --resume "$work/whole" --steps 6
has err "metrics.jsonl, found 0"
[ "$(wc -l <"$work/whole/metrics.jsonl")" = 2 ] || fail "expected two lines of metrics"
expect 0 check "$work/whole"

# --- other data of the same name
head -c 20000 /dev/zero | tr '\0' 'a' >"$work/text"
expect 0 train --model llama-small --depth 1 --width 32 --heads 2 --kv-heads 2 --seq 16 --batch 2 \
  --data "$work/text" --steps 2 --workers 1 --threads 1 --device cpu --no-eval --out "$work/words"
cp "$work/text" "$work/copy"
expect 0 train --resume "$work/words" --steps 3
head -c 20000 /dev/zero | tr '\0' 'b' >"$work/text"
expect 2 train --resume "$work/words" --steps 4
has err "other data of the name"
cp "$work/copy" "$work/text"
expect 0 train --resume "$work/words" --steps 4

# --- a path of the weights that cannot be written is found before the training
mkdir "$work/folder"
for path in "$work/none/w.safetensors" "$work/folder"; do
  "$reprise" "${train[@]}" "${random[@]}" --steps 100000000 --out "$work/export" --export "$path" \
    >"$work/out" 2>"$work/err"
  status=$?
  last="--export $path"
  [ $status -gt 0 ] && [ $status -le 2 ] || fail "status $status"
  has err "--export"
  [ ! -e "$work/export/metrics.jsonl" ] || fail "it trained"
  rm -rf "$work/export"
done

# --- a directory in use, and the results of a study
mkdir "$work/study"
echo '{"type":"study"}' >"$work/study/results.jsonl"
expect 0 check "$work/study"
echo 'not JSON' >>"$work/study/results.jsonl"
expect 1 check "$work/study"
has out "line 2 is not a JSON object"

finish "reprise check"
