#!/usr/bin/env bash
# Measures how much of the gradient reduction overlaps with the backward on a link of a
# given speed: two ranks in separate network namespaces, connected by a pair of virtual
# interfaces with a rate limit. Needs root and iproute2.
#
#   overlap.sh REPRISE [RATE [FLAGS...]]      RATE in the format of tc, such as 400mbit
#
# Prints for a single bucket, which starts at the end of the backward, and for small
# buckets: calls, time in progress, exposed time, hidden fraction, time per update, and the
# measured and expected traffic.
set -euo pipefail
reprise=$1
rate=${2:-400mbit}
shift $(($# < 2 ? $# : 2))
flags=(--model mlp --depth 12 --width 640 --data random --random-samples 512
  --batch 64 --accumulate 2 --steps 24 --optimizer sgd --workers 1 --threads 1
  --out none --format json "$@")
a=reprise-a-$$ b=reprise-b-$$
work=$(mktemp -d)
cleanup() {
  ip netns del "$a" 2>/dev/null || true
  ip netns del "$b" 2>/dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT
for name in "$a" "$b"; do
  ip netns add "$name"
  ip -n "$name" link set lo up
done
ip link add "va$$" netns "$a" type veth peer name "vb$$" netns "$b"
setup() {
  ip -n "$1" addr add "$3/24" dev "$2"
  ip -n "$1" link set "$2" up
  # The burst size of the rate limit must hold whole segments.
  ip netns exec "$1" tc qdisc add dev "$2" root tbf rate "$rate" burst 256kb latency 400ms
}
setup "$a" "va$$" 10.77.7.1
setup "$b" "vb$$" 10.77.7.2
sent() { ip netns exec "$a" cat "/sys/class/net/va$$/statistics/tx_bytes"; }

measure() {
  local bucket=$1 before
  before=$(sent)
  export WORLD_SIZE=2 MASTER_ADDR=10.77.7.1 MASTER_PORT=29777 LOCAL_RANK=0
  RANK=1 ip netns exec "$b" "$reprise" train "${flags[@]}" --bucket "$bucket" \
    >/dev/null 2>"$work/err1" &
  RANK=0 ip netns exec "$a" "$reprise" train "${flags[@]}" --bucket "$bucket" \
    >"$work/out" 2>"$work/err" || { cat "$work/err" "$work/err1"; exit 1; }
  wait
  python3 - "$work/out" "$bucket" $(($(sent) - before)) <<'PY'
import json, sys
s = json.load(open(sys.argv[1]))
hidden = 1 - s["reduce_wait_s"] / s["reduce_s"]
# A ring all-reduce sends 2 (N - 1) / N of the bytes: all of them for two ranks.
print(f'bucket {sys.argv[2]:>7}: {s["reduce_calls"] // s["reduce_windows"]:3} calls per '
      f'window, in progress {1000 * s["reduce_s"] / s["reduce_windows"]:7.1f} ms, exposed '
      f'{1000 * s["reduce_wait_s"] / s["reduce_windows"]:7.1f} ms, hidden '
      f'{100 * hidden:4.1f} %, update {s["step_ms"]:7.1f} ms; sent '
      f'{int(sys.argv[3]) / s["reduce_bytes"]:.3f} of the expected '
      f'{s["reduce_bytes"] / 2**20:.0f} MiB')
PY
}
echo "two ranks over $rate"
measure 4GiB
measure 2MiB
