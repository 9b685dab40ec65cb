#!/usr/bin/env bash
# Compares predicted and measured times of updates over a network of given speeds, for all
# values of --shard: ranks in network namespaces of their own, on one bridge, with a rate limit
# each. Needs root and iproute2.
#
#   network.sh REPRISE [RANKS [RATE...]]      RATE in the format of tc, such as 400mbit
#
# FLAGS (environment): more flags of train. Prints for each rate and level the predicted and
# the measured time of an update, predicted and measured peak, bytes that rank 0 sent per
# update against theory, and the share of the communication that the backward hid.
set -euo pipefail
reprise=$1
ranks=${2:-2}
shift $(($# < 2 ? $# : 2))
rates=("${@:-400mbit}")
[ $# -gt 0 ] || rates=(200mbit 1gbit 5gbit)
read -ra more <<<"${FLAGS:-}"
flags=(--model mlp --depth 12 --width 640 --data random --random-samples 4096
  --batch 256 --accumulate 1 --steps 16 --optimizer adamw --workers 1 --threads 1
  --bucket 2MiB --memory 2GiB --recompute optimal --out none --format json "${more[@]}")
id=$$
work=$(mktemp -d)
cleanup() {
  for ((r = 0; r < ranks; r++)); do ip netns del "rp$id-$r" 2>/dev/null || true; done
  ip link del "rpb$id" 2>/dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT
ip link add "rpb$id" type bridge
ip link set "rpb$id" up
for ((r = 0; r < ranks; r++)); do
  ip netns add "rp$id-$r"
  ip -n "rp$id-$r" link set lo up
  ip link add "rv$id-$r" type veth peer name eth0 netns "rp$id-$r"
  ip link set "rv$id-$r" master "rpb$id" up
  ip -n "rp$id-$r" addr add "10.77.8.$((r + 1))/24" dev eth0
  ip -n "rp$id-$r" link set eth0 up
done
sent() { ip netns exec "rp$id-0" cat /sys/class/net/eth0/statistics/tx_bytes; }

measure() {
  local shard=$1 rate=$2 before pids=() r
  before=$(sent)
  export WORLD_SIZE=$ranks MASTER_ADDR=10.77.8.1 MASTER_PORT=29779 LOCAL_RANK=0
  for ((r = 1; r < ranks; r++)); do
    RANK=$r ip netns exec "rp$id-$r" "$reprise" train "${flags[@]}" --shard "$shard" \
      >/dev/null 2>"$work/err$r" &
    pids+=($!)
  done
  RANK=0 ip netns exec "rp$id-0" "$reprise" train "${flags[@]}" --shard "$shard" \
    >"$work/out" 2>"$work/err" || { cat "$work"/err*; exit 1; }
  wait "${pids[@]}"
  python3 - "$work/out" "$rate" "$shard" $(($(sent) - before)) "$ranks" <<'PY'
import json, sys
s = json.load(open(sys.argv[1]))
rate, shard, sent, ranks = sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
predicted = s["predicted"]
others = (ranks - 1) / ranks
theory = s["reduce_bytes"] * others * (2 if shard == "none" else 1) + s["gather_bytes"] * others
hidden = 1 - s["reduce_wait_s"] / s["reduce_s"] if s["reduce_s"] else 0
print(f'{rate:>8} {shard:10} {predicted["step_ms"]:8.1f} ms predicted, {s["step_ms"]:8.1f} '
      f'measured ({100 * (predicted["step_ms"] / s["step_ms"] - 1):+5.1f} %); peak '
      f'{100 * (predicted["peak_bytes"] / s["peak_bytes"] - 1):+5.1f} %; sent '
      f'{sent / 2**20:7.1f} MiB, theory {theory / 2**20:7.1f}; hidden {100 * hidden:3.0f} %',
      flush=True)
PY
}

for rate in "${rates[@]}"; do
  for ((r = 0; r < ranks; r++)); do
    ip netns exec "rp$id-$r" tc qdisc replace dev eth0 root tbf rate "$rate" \
      burst 256kb latency 400ms
  done
  for shard in none optimizer gradients parameters; do measure "$shard" "$rate"; done
done
