#!/usr/bin/env bash
# Trains on real data: a convolutional network on MNIST with and without
# recomputation (the losses must be identical), and a language model on a text
# (its loss must fall below the unigram entropy of the text).
#
#   learn_test.sh REPRISE
set -euo pipefail
reprise=$1
device=${REPRISE_TEST_DEVICE:-cpu}
here=$(cd "$(dirname "$0")/../../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
  echo "learn_test: $*" >&2
  exit 1
}

for recompute in none sqrt; do
  "$reprise" train --model cnn-basic --image-size 28 --data mnist --batch 32 \
    --accumulate 2 --optimizer adam --steps 120 --device "$device" --threads 2 \
    --recompute $recompute --out "$work/$recompute" --format json \
    >"$work/$recompute.json" 2>"$work/log" || fail "$(cat "$work/log")"
done
if [ "$device" = cpu ]; then
  cmp "$work/none/metrics.jsonl" "$work/sqrt/metrics.jsonl" ||
    fail "recomputation changed the losses"
fi

text=$here/LICENSE
"$reprise" train --model gpt2 --depth 2 --width 64 --heads 2 --seq 64 \
  --vocab 256 --dropout 0 --data "$text" --batch 16 --lr 3e-3 --epochs 60 \
  --device "$device" --threads 2 --out "$work/text" --no-eval --format json \
  >"$work/text.json" 2>"$work/log" || fail "$(cat "$work/log")"

python3 - "$work" "$text" <<'PY'
import collections, json, math, sys
work, text = sys.argv[1:]
for name in ("none", "sqrt"):
    accuracy = json.load(open(f"{work}/{name}.json"))["eval_metrics"]["accuracy"]
    assert accuracy > 0.93, f"mnist, {name}: accuracy {accuracy}"
counts = collections.Counter(open(text, "rb").read()).values()
total = sum(counts)
entropy = -sum(c / total * math.log(c / total) for c in counts)
loss = json.load(open(f"{work}/text.json"))["loss"]
assert loss < entropy, f"text: loss {loss}, unigram entropy {entropy}"
print(f"mnist {accuracy:.2%} after 120 updates, the same with sqrt; "
      f"text: loss {loss:.3f}, unigram entropy {entropy:.3f}")
PY
