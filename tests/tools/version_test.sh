#!/usr/bin/env bash
# Checks the version and the facts about the build, as text and as JSON. Arguments: COMMAND
# SOURCE-DIR
set -u
source_dir=$2
. "$(dirname "$0")/expect.sh"

version=$(sed -n 's/^#define REPRISE_VERSION "\(.*\)"$/\1/p' "$source_dir/include/reprise/version.h")
expect 0 --version
[ "$(head -n 1 "$work/out")" = "reprise $version" ] || fail "the first line is not the version"
for name in commit LibTorch CUDA compiler "build type" libraries; do
  grep -q "^$name  *[^ ]" "$work/out" || fail "no $name"
done

expect 0 --version --format json
python3 - "$work/out" "$version" "$source_dir" <<'PY' || fail "the JSON differs from the build"
import json, subprocess, sys
build = json.load(open(sys.argv[1]))
assert build["version"] == sys.argv[2]
assert build["libtorch"].count(".") == 2 and build["build_type"]
assert {"CLI11", "fmt", "nlohmann_json", "yaml-cpp", "zlib"} <= set(build["libraries"])
assert build["cuda"] is None or "kernels" in build["cuda"]
# The commit is one of this repository: the build may be older than the last one.
commit = build["commit"].removesuffix("-modified")
if commit != "unknown":
    found = subprocess.run(["git", "-C", sys.argv[3], "cat-file", "-t", commit],
                           capture_output=True, text=True)
    assert found.stdout.strip() == "commit", commit
PY
# The order of the flags does not matter, and --format is about --version alone.
expect 0 --format json --version
python3 -m json.tool "$work/out" >/dev/null || fail "no JSON"
expect 2 --format json devices
has err "--format requires --version"
expect 2 --version --format xml
has err "expected one of table, json"

finish "the version"
