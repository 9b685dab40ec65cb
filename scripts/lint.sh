#!/usr/bin/env bash
# Checks the sources: format, layers and version checks, tests of every source, cppcheck.
# Usage: scripts/lint.sh [--fix]; --fix formats the sources instead.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mapfile -t sources < <(git ls-files -co --exclude-standard '*.h' '*.cpp')

if [ "${1:-}" = --fix ]; then
  clang-format -i "${sources[@]}"
  exit 0
fi

echo "lint: format" >&2
clang-format --dry-run --Werror "${sources[@]}"

echo "lint: layers" >&2
python3 scripts/check_layers.py

echo "lint: tests" >&2
python3 scripts/check_tests.py

echo "lint: cppcheck" >&2
mapfile -t checked < <(git ls-files -co --exclude-standard 'src/*.cpp' 'tools/*.cpp')
# clang-tidy finds more, but Debian 12's version cannot parse LibTorch's headers as C++20
# with GCC 12's standard library.
cppcheck --quiet --std=c++20 --language=c++ -j "$(nproc)" -I include -I src \
  --enable=warning,performance,portability --inline-suppr \
  --suppressions-list=.cppcheck-suppressions --error-exitcode=1 "${checked[@]}"
