#!/usr/bin/env bash
# Kills trainings with SIGKILL at random times, resumes them until they end, and
# compares the last state and the metrics with those of a training that was never
# stopped. They must be bit-identical. Then stops a training with SIGTERM.
#
#   kill_test.sh REPRISE [KILLS]
set -euo pipefail
reprise=$1
kills=${2:-6}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
RANDOM=${SEED:-7}
flags=(--model mlp --depth 3 --width 64 --data random --random-samples 200
  --batch 4 --accumulate 3 --epochs 6 --dropout 0.2 --optimizer adam
  --clip 1 --eval-every 25 --save-every 3 --workers 2 --threads 1 --format json)

fail() {
  echo "kill_test: $*" >&2
  exit 1
}

# last_state DIR: path of the newest state. Its metadata contains times, so only
# the tensors after the header are compared.
last_state() { ls "$1"/state-*.safetensors | tail -n 1; }
tensors() {
  python3 - "$1" <<'PY'
import hashlib, json, struct, sys
data = open(sys.argv[1], "rb").read()
size = struct.unpack("<Q", data[:8])[0]
header = json.loads(data[8:8 + size])
state = json.loads(header.pop("__metadata__")["reprise"])
state.pop("train_s")
print(hashlib.sha256(data[8 + size:]).hexdigest(), json.dumps(header), state)
PY
}

begin=$(date +%s%N)
"$reprise" train "${flags[@]}" --out "$work/whole" >/dev/null 2>&1 ||
  fail "the training itself failed"
whole_ms=$((($(date +%s%N) - begin) / 1000000))
expected=$(tensors "$(last_state "$work/whole")")

compare() {
  [ "$(tensors "$(last_state "$1")")" = "$expected" ] ||
    fail "$2: the last state differs"
  cmp -s "$1/metrics.jsonl" "$work/whole/metrics.jsonl" ||
    fail "$2: the metrics differ"
}

done_kills=0
run=0
while [ $done_kills -lt "$kills" ]; do
  run=$((run + 1))
  dir=$work/killed$run
  how=(--out "$dir")
  while true; do
    "$reprise" train "${flags[@]}" "${how[@]}" >/dev/null 2>"$work/log" &
    pid=$!
    # At any time in the life of a process, including its start and end.
    sleep "$(awk "BEGIN { print $RANDOM / 32768 * $whole_ms / 1000 }")"
    if kill -KILL $pid 2>/dev/null; then done_kills=$((done_kills + 1)); fi
    if wait $pid 2>/dev/null; then break; fi
    grep -q "^reprise:" "$work/log" && fail "$(cat "$work/log")"
    # Start again if the process was killed before it created the run.
    if [ -f "$dir/config.json" ]; then
      how=(--resume "$dir")
    fi
    [ $done_kills -lt "$kills" ] || {
      if [ -f "$dir/config.json" ]; then
        "$reprise" train --resume "$dir" >/dev/null 2>&1 || fail "resume failed"
      else
        "$reprise" train "${flags[@]}" --out "$dir" >/dev/null 2>&1
      fi
      break
    }
  done
  compare "$dir" "run $run"
done
echo "$done_kills kills in $run runs: every byte the same"

# SIGTERM saves the state and prints the command to resume.
rm "$work/log"  # the previous log has steps too
touch "$work/log"
"$reprise" train "${flags[@]}" --epochs 200 --out "$work/term" \
  >/dev/null 2>"$work/log" &
pid=$!
while ! grep -q "step" "$work/log"; do
  kill -0 $pid 2>/dev/null || fail "it ended by itself: $(cat "$work/log")"
  sleep 0.05
done
kill -TERM $pid
status=0
wait $pid || status=$?
[ $status = 143 ] || fail "status $status after SIGTERM"
grep -q "go on with: reprise train --resume $work/term" "$work/log" ||
  fail "no word on how to go on: $(cat "$work/log")"
echo "SIGTERM: saved, and said how to go on"
