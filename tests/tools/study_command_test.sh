#!/usr/bin/env bash
# Tests `reprise study` and `reprise report`.
. "$(dirname "$0")/expect.sh"
cd "$work" || exit 1
cat >small.yaml <<'YAML'
title: A small one
question: Does it run?
views: [grid, frontier]
shared: {model: mlp, data: random, random-samples: 64, steps: 4, threads: 1, workers: 1}
runs:
  - depth: 4
    width: 16
    batch: [4, 8]
    recompute: [none, sqrt]
  - {depth: 4, width: 16, batch: 4, recompute: "revolve:99999999"}
YAML
results() { python3 - "$1" <<'PY'
import json, sys
runs = [json.loads(l) for l in open(sys.argv[1]) if json.loads(l)["type"] == "run"]
for r in sorted(runs, key=lambda r: r["id"]):
    print(r["id"], r["status"], json.dumps(r["case"], sort_keys=True))
PY
}

expect 0 study --list
has out quick
has out mnist

expect 0 study small.yaml --dry-run
has out '5 runs'
has out 'batch 8'
[ ! -e reprise-studies ] || fail "a dry run created files"

expect 0 study small.yaml --device "$device"
has out '5 done'
has out 'reprise-studies/small/report.html'
has err 'A small one'
has err 'about'
grep -q '</html>' reprise-studies/small/report.html || fail "the page is incomplete"
results reprise-studies/small/results.jsonl >whole
python3 - <<'PY' || fail "a record differs from docs/results.md"
import json, shlex
records = [json.loads(l) for l in open("reprise-studies/small/results.jsonl")]
assert records[0]["type"] == "study" and records[0]["runs"] == 5
for r in records[1:]:
    assert r["figures"]["steps"] == 4 and r["figures"]["peak_bytes"] > 0
    assert r["observed"]["samples"] >= 2 and len(r["series"]["t_s"]) >= 2
    assert r["device"]["name"] and r["versions"]["libtorch"]
    assert r["predicted"]["peak_bytes"] > 0
    assert shlex.split(r["command"])[:2] == ["reprise", "train"]
PY

# The recorded command repeats a run.
command=$(python3 -c 'import json
for l in open("reprise-studies/small/results.jsonl"):
    r = json.loads(l)
    if r["type"] == "run": print(r["command"]); break')
eval "set -- ${command#reprise}"
expect 0 "$@"
has out '"peak_bytes"'

# Without --resume, existing results are not changed; with it, no run is repeated.
expect 2 study small.yaml --device "$device"
has err 'use --resume to continue'
before=$(cksum <reprise-studies/small/results.jsonl)
expect 0 study small.yaml --device "$device" --resume
has out '0 done'
[ "$before" = "$(cksum <reprise-studies/small/results.jsonl)" ] ||
  fail "results have changed"

# Two parts together cover all runs.
expect 0 study small.yaml --device "$device" --out parts --part 1/2 --no-estimate --no-report
expect 0 study small.yaml --device "$device" --out parts --part 2/2 --resume --no-estimate
results parts/results.jsonl | cmp -s - whole || fail "the parts do not cover all runs"

# --set and --only.
expect 0 study small.yaml --device "$device" --only batch=8 --set steps=2 --out few --no-estimate --no-report
has out '2 done'
expect 0 report parts few -o both.html
has out 'both.html'

# A run that exceeds the memory limit is recorded as a result.
if [ "$device" = cpu ]; then
  cat >hungry.yaml <<'YAML'
shared: {model: mlp, depth: 4, width: 16, data: random, steps: 2, threads: 1, workers: 1}
runs:
  - {batch: 4, random-samples: 64}
  - {batch: 200000, random-samples: 200000}
  - {batch: 8, random-samples: 64}
YAML
  expect 0 study hungry.yaml --device cpu --run-memory 900MiB --no-estimate
  has out '2 done, 1 did not fit'
  # OpenBLAS would try for ever to allocate its buffers within such limits.
  cat >small.yaml <<'YAML'
timeout: 60
shared: {model: mlp, depth: 4, width: 16, data: random, random-samples: 64, steps: 2, workers: 1}
runs:
  - {batch: 4}
YAML
  for limit in 100MiB 200MiB; do
    rm -rf limited
    expect 0 study small.yaml --device cpu --run-memory $limit --out limited --no-report
    has out '0 done, 1 did not fit'
  done
fi

# A study fails if and only if all of its runs fail.
cat >failing.yaml <<'YAML'
shared: {model: mlp, depth: 4, width: 16, data: random, random-samples: 64, steps: 2, threads: 1, workers: 1}
runs:
  - {batch: [2, 4], recompute: "every:99"}
YAML
expect 1 study failing.yaml --device "$device" --no-estimate --no-report
has out '0 done, 0 did not fit, 2 failed'
has err 'every run has failed'
sed -i 's/"every:99"/["every:99", sqrt]/' failing.yaml
expect 0 study failing.yaml --device "$device" --no-estimate --no-report --resume
has out '2 done, 0 did not fit, 0 failed'
# Output that cannot be written.
last="a study into a full disk"
"$reprise" study failing.yaml --device "$device" --resume --no-estimate --no-report \
  >/dev/full 2>"$work/err"
[ $? = 1 ] || fail "expected exit status 1"
has err 'cannot write to standard output'

# Errors are reported before any run starts.
expect 2 study nosuch
has err 'neither a file nor a built-in study'
printf 'runs:\n  - {model: mlp, bacth: 4}\n' >wrong.yaml
expect 2 study wrong.yaml
has err 'line 2: unknown key'
has err 'did you mean batch?'
printf 'runs:\n  - {model: mlp, batch: four}\n' >wrong.yaml
expect 2 study wrong.yaml
has err 'batch'
printf 'runs:\n  - {model: mlp, precision: fp7}\n' >wrong.yaml
expect 2 study wrong.yaml
has err 'precision'
expect 2 study small.yaml --part 3/2
expect 2 study small.yaml --set bacth=4
has err 'did you mean batch?'
expect 2 study small.yaml --only batch=5
has err 'no run has batch 5'
expect 2 report nosuch
has err 'results: cannot read nosuch: No such file'
[ ! -e reprise-studies/wrong ] || fail "an invalid study created files"
finish study_command
