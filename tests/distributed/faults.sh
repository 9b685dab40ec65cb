#!/usr/bin/env bash
# Injects faults into ranks at random points of a training; see faults_test.cpp.
#
#   tests/distributed/faults.sh [--times N] [--seed N] [--shard LEVEL]
#                               [--tests build/release/tests/reprise_tests]
#
# Prints one line per kind of fault: the number of rounds and the time until all ranks ended.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
times=30
seed=1
shard=none
tests=
while [ $# -gt 0 ]; do
  case "$1" in
    --times) times=$2 ;;
    --seed) seed=$2 ;;
    --shard) shard=$2 ;;
    --tests) tests=$2 ;;
    *)
      echo "faults.sh: expected --times, --seed, --shard or --tests, got $1" >&2
      exit 2
      ;;
  esac
  shift 2
done
[ -n "$tests" ] || tests=$(find "$root/build/release" -name reprise_tests -type f | head -1)
[ -x "$tests" ] || {
  echo "faults.sh: no reprise_tests in build/release; run ./test first, or name it with --tests" >&2
  exit 2
}
REPRISE_FAULTS=$times REPRISE_FAULTS_SEED=$seed REPRISE_FAULTS_SHARD=$shard \
  OMP_WAIT_POLICY=passive \
  exec "$tests" --gtest_filter='Faults.*'
