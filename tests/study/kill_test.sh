#!/usr/bin/env bash
# Kills a study with SIGKILL at random times and resumes it until it ends. The records must
# equal those of an undisturbed study, without duplicates, and no training may outlive the
# study. Then does the same with SIGINT.
#
#   kill_test.sh REPRISE [KILLS]
set -euo pipefail
reprise=$1
kills=${2:-4}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
RANDOM=${SEED:-11}
cd "$work"
cat >many.yaml <<'YAML'
shared: {model: mlp, depth: 3, width: 16, data: random, random-samples: 61, steps: 6, threads: 1, workers: 1}
runs:
  - {batch: [2, 4, 8], recompute: [none, sqrt], optimizer: [sgd, adam]}
YAML
fail() {
  echo "kill_test: $*" >&2
  exit 1
}
# ids DIR: one line per run, without times and without the peak, which depends on how much
# data was read ahead.
ids() {
  python3 - "$1/results.jsonl" <<'PY'
import json, sys
for line in open(sys.argv[1]):
    r = json.loads(line)
    if r["type"] == "run":
        f = r["figures"]
        print(r["id"], r["status"], json.dumps(r["case"], sort_keys=True),
              f["loss"], f["steps"], f["kept_bytes"])
PY
}
# An array and not a function, which would run in a subshell.
study=("$reprise" study many.yaml --device cpu --no-estimate --no-report)

begin=$(date +%s%N)
"${study[@]}" --out whole >/dev/null 2>&1 || fail "the study itself failed"
whole_ms=$((($(date +%s%N) - begin) / 1000000))
ids whole | sort >expected
[ "$(wc -l <expected)" = 12 ] || fail "expected 12 records"

done_kills=0
attempts=0
misses=0  # studies in a row that ended before they were killed
while [ $done_kills -lt "$kills" ]; do
  # A new directory per attempt, since a finished study cannot be killed.
  out=killed$attempts
  attempts=$((attempts + 1))
  before=$done_kills
  while true; do
    "${study[@]}" --out "$out" --resume >/dev/null 2>log &
    pid=$!
    sleep "$(awk "BEGIN { print $RANDOM / 32768 * $whole_ms / 1000 }")"
    if kill -KILL $pid 2>/dev/null; then done_kills=$((done_kills + 1)); fi
    if wait $pid 2>/dev/null; then break; fi
    grep -q "^reprise:" log && fail "$(cat log)"
    sleep 0.2
    for training in $(pgrep -f -- "$reprise train .*--random-samples 61"); do
      # Ignore the trainings of other instances of this test.
      [ "$(readlink "/proc/$training/cwd")" != "$work" ] || fail "a training outlived its study"
    done
    [ $done_kills -lt "$kills" ] || { "${study[@]}" --out "$out" --resume >/dev/null 2>&1; break; }
  done
  # Duplicates would show here.
  ids "$out" | sort | cmp -s - expected || fail "the records differ from an undisturbed study"
  # The study ended before it was killed.
  if [ $done_kills -eq $before ]; then
    misses=$((misses + 1))
    [ $misses -lt 20 ] || fail "the study always ended before it was killed ($misses attempts)"
    whole_ms=$((whole_ms / 2 + 1))
  else
    misses=0
  fi
done
echo "$done_kills kills: the same records"
rm log
touch log

"${study[@]}" --out interrupted >/dev/null 2>log &
pid=$!
while [ "$(grep -c peak log || true)" -lt 2 ]; do
  kill -0 $pid 2>/dev/null || fail "the study ended by itself: $(cat log)"
  sleep 0.02
done
kill -INT $pid
status=0
wait $pid || status=$?
[ $status = 130 ] || fail "status $status after SIGINT"
grep -q "go on with: reprise study many.yaml --device cpu --out interrupted --resume" log ||
  fail "no hint on how to resume: $(cat log)"
"${study[@]}" --out interrupted --resume >/dev/null 2>&1
ids interrupted | sort | cmp -s - expected || fail "the records differ after SIGINT"
echo "SIGINT: the same records"
