#!/usr/bin/env bash
# Tests `reprise launch`: normal runs, faults, rejected configurations and resuming.
#
#   ranks_command_test.sh REPRISE [ROUNDS]
#
# Each round stops, kills or aborts (in turn) a random rank at a random time and resumes
# the run. The final state must equal that of an undisturbed run.
# faults.sh does the same without the command and measures the time to detection.
. "$(dirname "$0")/../tools/expect.sh"
rounds=${2:-1}
RANDOM=${SEED:-5}
export OMP_NUM_THREADS=1
flags=(--model mlp --depth 2 --width 32 --data random --random-samples 150
  --global-batch 10 --batch 2 --dropout 0.2 --optimizer adam --clip 1
  --eval-every 40 --workers 1 --bucket 16KiB --device "$device" --backend gloo)

losses() { cat "$1/metrics.jsonl"; }
# state DIR: a hash of the tensors in its newest state.
state() {
  python3 - "$1" <<'PY'
import glob, hashlib, struct, sys
data = open(sorted(glob.glob(sys.argv[1] + "/state-*.safetensors"))[-1], "rb").read()
size = struct.unpack("<Q", data[:8])[0]
print(hashlib.sha256(data[8 + size:]).hexdigest())
PY
}

# The summary counts the reductions.
expect 0 launch -n 2 -- train "${flags[@]}" --steps 5 --sync-norm --out "$work/two" \
  --format json
has out '"ranks": 2'
has out '"backend": "gloo"'
has out '"reduce_windows": 5'
grep -q '"sync-norm": true' "$work/two/config.json" || fail "--sync-norm is not saved"
[ -s "$work/two/rank-1.log" ] || fail "rank 1 has an empty log"
lacks err "rank 1"

# A flag that differs on one rank is rejected by name.
(
  export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1
  MASTER_PORT=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  export MASTER_PORT
  RANK=1 "$reprise" train "${flags[@]}" --steps 5 --lr 0.5 --out none >/dev/null 2>"$work/err1" &
  RANK=0 "$reprise" train "${flags[@]}" --steps 5 --out none >/dev/null 2>"$work/err"
  echo $? >"$work/status"
  wait
)
last="two ranks, one with --lr 0.5"
[ "$(cat "$work/status")" = 1 ] || fail "exit status $(cat "$work/status")"
has err "rank 1 has --lr 0.5, rank 0 has 0.001"
has err1 "rank 1 has --lr 0.5, rank 0 has 0.001"

expect 2 launch -n 0 -- train
expect 2 launch -n 2
expect 2 launch -n 2 -- train "${flags[@]}" --shard optimizer --optimizer adafactor \
  --steps 2 --out none
has err "--shard: optimizer works with sgd, adam and adamw"

# SIGINT reaches all ranks, and a different number of ranks can resume.
long=("${flags[@]}" --steps 4000 --save-every 20 --rank-timeout 3)
"$reprise" launch -n 2 -- train "${long[@]}" --out "$work/stop" >"$work/out" 2>"$work/err" &
pid=$!
for _ in $(seq 100); do grep -q "^step\|saved" "$work/err" && break; sleep 0.1; done
sleep 0.3
kill -INT $pid
wait $pid
status=$?
last="an interrupted launch"
[ $status = 130 ] || fail "exit status $status"
lacks err "ended with status"
has err "stopped; go on with: reprise train --resume"
# Several ranks on one GPU must be requested with --device in each call.
expect 0 launch -n 3 -- train --resume "$work/stop" --steps 200 --device "$device"
expect 0 train --resume "$work/stop" --steps 230 --device "$device"

# A fault in one rank ends all ranks, and the run resumes bit-identically.
short=("${flags[@]}" --steps 300 --save-every 15 --rank-timeout 3)
expect 0 launch -n 3 -- train "${short[@]}" --out "$work/whole"
expected=$(state "$work/whole")
kinds=(ABRT STOP KILL)
for round in $(seq "$rounds"); do
  how=${kinds[round % 3]}
  dir=$work/$how$round
  victim=$((RANDOM % 3))
  "$reprise" launch -n 3 -- train "${short[@]}" --out "$dir" >"$work/out" 2>"$work/err" &
  pid=$!
  last="round $round: SIG$how to rank $victim"
  for _ in $(seq 300); do ls "$dir"/state-* >/dev/null 2>&1 && break; sleep 0.05; done
  sleep "0.$((RANDOM % 10))"
  # Children are sorted by start time, which is rank order.
  child=$(ps -o pid= --ppid $pid --sort=start_time,pid | sed -n "$((victim + 1))p")
  begin=$(date +%s%N)
  [ -z "$child" ] || kill -$how $child 2>/dev/null
  wait $pid
  status=$?
  took_ms=$((($(date +%s%N) - begin) / 1000000))
  if [ $status = 0 ]; then continue; fi # it ended before the signal
  # The time-out, plus a margin for a busy machine.
  [ $took_ms -lt 8000 ] || fail "ended after $took_ms ms"
  has err "rank $victim"
  expect 0 launch -n 3 -- train --resume "$dir" --rank-timeout 3 --device "$device"
  last="resumed after SIG$how"
  [ "$(state "$dir")" = "$expected" ] || fail "the last state differs"
  cmp -s "$dir/metrics.jsonl" "$work/whole/metrics.jsonl" || fail "the metrics differ"
done
finish ranks_command_test
