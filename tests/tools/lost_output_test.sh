#!/usr/bin/env bash
# Tests that a training survives the loss of its output: standard error that is full or closed,
# a pipe whose reader has ended, a log on a full disk; and that SIGHUP saves and ends it.
set -u
. "$(dirname "$0")/expect.sh"

train=("$reprise" train --model mlp --depth 1 --width 8 --data random --random-samples 16
  --batch 4 --workers 1 --threads 1 --device cpu --no-eval)
: >"$work/out"
: >"$work/err"
# complete DIR: the training reached its end, and the files are whole.
complete() {
  [ -s "$1/summary.json" ] || fail "no summary"
  "$reprise" check "$1" >"$work/out" 2>"$work/err" || fail "not whole"
  [ "$(wc -l <"$1/metrics.jsonl")" = "$2" ] || fail "expected $2 lines of metrics"
}

last="2>/dev/full"
"${train[@]}" --steps 6 --out "$work/full" >/dev/null 2>/dev/full || fail "status $?"
complete "$work/full" 6

last="2>&-"
"${train[@]}" --steps 6 --out "$work/closed" >/dev/null 2>&- || fail "status $?"
complete "$work/closed" 6

last="all closed"  # the summary is lost, which is an error
"${train[@]}" --steps 6 --out "$work/none" <&- >&- 2>&- && fail "status 0, expected 1"
complete "$work/none" 6

last="| head -1"
(
  "${train[@]}" --steps 6 --out "$work/head" 2>&1
  echo $? >"$work/status"
) | head -1 >/dev/null
complete "$work/head" 6

last="a pipe that was closed before the start"
mkfifo "$work/pipe"
sleep 0 <"$work/pipe" &
"${train[@]}" --steps 6 --out "$work/piped" 2>"$work/pipe" >/dev/null || fail "status $?"
complete "$work/piped" 6

last="a log that reaches the limit on the size of files"
head -c 1024 /dev/zero >"$work/log"
(
  ulimit -f 1
  exec "${train[@]}" --steps 6 --out none
) >/dev/null 2>>"$work/log" || fail "status $?"

last="SIGHUP"
: >"$work/err"
"${train[@]}" --epochs 1000000 --save-every 1000000 --out "$work/hup" >/dev/null 2>"$work/err" &
pid=$!
for _ in $(seq 400); do grep -q "^step" "$work/err" && break; sleep 0.05; done
kill -HUP $pid
wait $pid
status=$?
[ $status = 129 ] || fail "status $status, expected 129"
has err "saved $work/hup"
has err "stopped; go on with: reprise train --resume $work/hup"

last="nohup"
: >"$work/err"
(
  trap '' HUP
  exec "${train[@]}" --steps 2000 --save-every 1000000 --out "$work/nohup"
) >/dev/null 2>"$work/err" &
pid=$!
for _ in $(seq 400); do grep -q "^step" "$work/err" && break; sleep 0.05; done
kill -HUP $pid 2>/dev/null
wait $pid
status=$?
[ $status = 0 ] || fail "status $status, expected 0"

finish "lost output"
