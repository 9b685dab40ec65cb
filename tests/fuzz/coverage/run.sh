#!/usr/bin/env bash
# Builds the parsers that use no tensors with libFuzzer, AddressSanitizer and UBSan, and gives
# each format inputs for some seconds. Inputs that fail are written to fuzz-failures/.
#
#   tests/fuzz/coverage/run.sh [--seconds S] [--format NAME] [--replay FILE]
#
# Needs clang with its runtime (Debian: clang, libclang-rt-14-dev).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$here/../../..
build=$root/build/fuzz-coverage
formats=(header study metrics profile plan summary schedule bytes store)
seconds=60
replay=
while [ $# -gt 0 ]; do
  case "$1" in
    --seconds) seconds=$2 ;;
    --format) formats=("$2") ;;
    --replay) replay=$(realpath "$2") ;;
    *)
      sed -n '2,/^set/{/^#/{s/^# \{0,1\}//;p}}' "$0"
      exit 2
      ;;
  esac
  shift 2
done
if [ -n "$replay" ] && [ ${#formats[@]} -ne 1 ]; then
  echo "--replay needs --format"
  exit 2
fi

mkdir -p "$build"
log=$build/build.log
{ cmake -S "$here" -B "$build" -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=None &&
  cmake --build "$build"; } >"$log" 2>&1 || {
  tail -n 40 "$log"
  echo "the build failed; its complete output is in $log"
  exit 1
}

failures=$PWD/fuzz-failures
shared=/dev/shm
[ -w "$shared" ] || shared=${TMPDIR:-/tmp}
work=$(mktemp -d "$shared/reprise-fuzz-XXXXXX")
trap 'rm -rf "$work"' EXIT
# The time of an input and the memory that it may take, as for reprise_fuzz. Messages of LibTorch
# have stack traces, which take most of the time.
limits=(-timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=256)
export ASAN_OPTIONS=detect_leaks=1 TORCH_SHOW_CPP_STACKTRACES=0
status=0
for format in "${formats[@]}"; do
  export FUZZ_FORMAT=$format
  # Headers are those of the corpus of whole files.
  corpus=$here/../corpus/$format
  [ "$format" != header ] || corpus=$here/../corpus/safetensors
  mkdir -p "$work/$format/found"
  cd "$work/$format"
  if [ -n "$replay" ]; then
    "$build/fuzz_parsers" "${limits[@]}" "$replay"
    continue
  fi
  mkdir -p "$failures"
  if "$build/fuzz_parsers" "${limits[@]}" -max_total_time="$seconds" -print_final_stats=1 \
    -artifact_prefix="$failures/$format-" found "$corpus" >"$work/$format/log" 2>&1; then
    result=
  else
    result="  FAILED"
    status=1
    tail -n 30 "$work/$format/log"
  fi
  inputs=$(sed -n 's/^stat::number_of_executed_units: //p' "$work/$format/log")
  covered=$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$work/$format/log" | tail -n 1)
  printf '%-10s %9s inputs  %6s edges covered%s\n' \
    "$format" "${inputs:-?}" "${covered:-?}" "$result"
done
rmdir "$failures" 2>/dev/null || true
exit $status
