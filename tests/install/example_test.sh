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

# Configures and builds a project of examples/ in $work/NAME-build. Arguments: NAME
# SOURCE-DIR CMAKE-FLAGS
build_project() {
  local name=$1 source=$2
  shift 2
  # -O1 takes half the time to compile; the installed library is optimised.
  cmake -G Ninja -S "$source" -B "$work/$name-build" -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG" -DCMAKE_PREFIX_PATH="$work/prefix" "$@"
  cmake --build "$work/$name-build"
}

# Runs a program that checks itself. Arguments: NAME ARGUMENTS
run_example() {
  local name=$1
  shift
  (cd "$work" && "$all/$name/$name" "$@") >"$work/output" 2>&1 ||
    fail "$name $* failed: $(cat "$work/output")"
}

cmake --install "$build" --prefix "$work/prefix" >"$work/install.log"
"$work/prefix/bin/reprise" --version

# All projects at once, because most of the time is spent on LibTorch's headers. Plug-in
# and core are also built alone, as projects of their own.
cp -r "$examples" "$work/examples"
build_project all "$work/examples" -DFORECAST_PROGRAM=ON
all=$work/all-build
"$all/installed/example" | tee "$work/output"
grep -q "gradients equal: yes" "$work/output"
run_example own_loop
run_example own_optimizer
run_example gan
run_example ranks
run_example lora "$work/base.safetensors" "$work/adapter"
[ -s "$work/adapter/adapter_config.json" ] || fail "lora saved no adapter"
run_example own_dataset sequences
run_example own_dataset torch
run_example own_dataset stream "$work/stream-whole"
tail -1 "$work/output" >"$work/stream-end"
(run_example own_dataset stream "$work/stream-killed" 5) 2>/dev/null &&
  fail "own_dataset was not killed"
run_example own_dataset stream "$work/stream-killed"
tail -1 "$work/output" | cmp - "$work/stream-end" ||
  fail "the resumed stream ended differently"

# The whole command for a model of the project's own.
own() {
  "$all/own_model/own_model" "$@" >"$work/output" 2>"$work/errors" ||
    fail "own_model $* failed: $(cat "$work/errors")"
}
own train --help
grep -q "convolutions that tag words" "$work/output" || fail "--help lacks the own model"
# A fixed micro-batch: with a planned one, two runs may differ in the last bits.
small=(--model tagger --depth 3 --width 16 --batch 8 --global-batch 32)
own verify --model tagger --depth 3 --width 16
own plan "${small[@]}" --memory 8MiB --format json
own train "${small[@]}" --memory 8MiB --steps 6 --out "$work/whole" \
  --export "$work/whole.safetensors"
own train "${small[@]}" --memory 8MiB --steps 3 --out "$work/part"
own train --resume "$work/part" --steps 6 --export "$work/part.safetensors"
cmp "$work/part.safetensors" "$work/whole.safetensors" ||
  fail "resuming gave other weights"
own launch -n 2 -- train "${small[@]}" --steps 2 --out none
own profile "${small[@]}"

# A plug-in for the installed command, and the same file as a program.
build_project plugin "$work/examples/plugin"
plugin=$work/plugin-build/libforecast.so
small=(--model forecast --depth 2 --width 4 --taps 5 --batch 16)
(cd "$work/plugin-build" && "$work/prefix/bin/reprise" train --plugin ./libforecast.so \
  "${small[@]}" --steps 3 --out "$work/plugged" >"$work/output" 2>&1) ||
  fail "the plug-in does not train: $(cat "$work/output")"
"$work/prefix/bin/reprise" train --resume "$work/plugged" --steps 6 \
  --export "$work/plugged.safetensors" >"$work/output" 2>&1 ||
  fail "the run with a plug-in does not continue: $(cat "$work/output")"
"$all/plugin/forecast_command" train "${small[@]}" --steps 6 --out none \
  --export "$work/program.safetensors" >"$work/output" 2>&1 ||
  fail "the program does not train: $(cat "$work/output")"
cmp "$work/plugged.safetensors" "$work/program.safetensors" ||
  fail "plug-in and program gave other weights"
"$all/plugin/forecast_command" train --plugin "$plugin" 2>"$work/output" &&
  fail "a model was registered twice"
grep -q "there is a model 'forecast' already" "$work/output" ||
  fail "the program does not load plug-ins: $(cat "$work/output")"
# Its CMakeLists.txt does not allow plug-ins.
"$all/own_model/own_model" train --plugin "$plugin" 2>"$work/output" &&
  fail "own_model loaded a plug-in"
grep -q "does not export its symbols" "$work/output" ||
  fail "own_model does not say why it loads no plug-in: $(cat "$work/output")"

script=$all/script/script_example
"$script" "$work/nothing" 1GiB 2>"$work/output" && fail "script_example trained no model"
grep -q "nothing/model.json" "$work/output"

# The core needs LibTorch alone: its project is configured as on a machine without the
# packages of the other components.
build_project core "$work/examples/core" -DCMAKE_DISABLE_FIND_PACKAGE_ZLIB=ON \
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
