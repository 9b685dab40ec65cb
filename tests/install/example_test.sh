#!/usr/bin/env bash
# Installs the library, then configures, builds and runs a project outside the
# tree against the installed copy. Arguments: BUILD-DIR EXAMPLE-DIR
set -euo pipefail
build=$1
example=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install "$build" --prefix "$work/prefix" >"$work/install.log"
cp -r "$example" "$work/example"
cmake -G Ninja -S "$work/example" -B "$work/build" -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_PREFIX_PATH="$work/prefix"
cmake --build "$work/build"
"$work/build/example" | tee "$work/output"
grep -q "gradients equal: yes" "$work/output"
"$work/prefix/bin/reprise" --version
