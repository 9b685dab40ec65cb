#!/usr/bin/env bash
# Installs the library, then configures, builds and runs the projects in examples/ outside
# the tree against the installed copy. Arguments: BUILD-DIR EXAMPLES-DIR
set -euo pipefail
build=$1
examples=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
  echo "example_test: $*" >&2
  exit 1
}

# Configures and builds examples/NAME in $work/NAME-build. Arguments: NAME CMAKE-FLAGS
build_example() {
  local name=$1
  shift
  cp -r "$examples/$name" "$work/$name"
  cmake -G Ninja -S "$work/$name" -B "$work/$name-build" -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_PREFIX_PATH="$work/prefix" "$@"
  cmake --build "$work/$name-build"
}

cmake --install "$build" --prefix "$work/prefix" >"$work/install.log"
"$work/prefix/bin/reprise" --version

build_example installed
"$work/installed-build/example" | tee "$work/output"
grep -q "gradients equal: yes" "$work/output"

build_example script
script=$work/script-build/script_example
"$script" "$work/nothing" 1GiB 2>"$work/output" && fail "script_example trained no model"
grep -q "nothing/model.json" "$work/output"

# The core needs LibTorch alone: its project is configured as on a machine without the
# packages of the other components.
build_example core -DCMAKE_DISABLE_FIND_PACKAGE_ZLIB=ON \
  -DCMAKE_DISABLE_FIND_PACKAGE_yaml-cpp=ON
core=$work/core-build/core_example
"$core" | tee "$work/output"
grep -q "gradients equal: yes" "$work/output"
ldd "$core" | grep "not found" && fail "core_example lacks a library"
readelf -d "$core" | grep NEEDED >"$work/needed"
grep -E "yaml-cpp|libz\." "$work/needed" && fail "core_example is linked with the above"
nm -C --undefined-only "$core" >"$work/undefined"
grep -E "c10d::|YAML::|gzopen|inflate" "$work/undefined" &&
  fail "core_example refers to the symbols above"
exit 0
