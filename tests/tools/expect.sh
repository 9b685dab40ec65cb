# Sourced by the tests of the command. The first argument is the path of the command.
reprise=$1
device=${REPRISE_TEST_DEVICE:-cpu}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

# expect STATUS ARGS...: runs the command with its output in $work/out and $work/err.
expect() {
  local want=$1 got
  shift
  "$reprise" "$@" >"$work/out" 2>"$work/err"
  got=$?
  last="reprise $*"
  [ "$got" = "$want" ] || fail "exit status $got, expected $want"
}
has() { grep -qF -- "$2" "$work/$1" || fail "no '$2' in $1"; }
lacks() { ! grep -qF -- "$2" "$work/$1" || fail "'$2' in $1"; }
fail() {
  echo "FAILED: $last: $1"
  sed 's/^/  out: /' "$work/out" | head -5
  sed 's/^/  err: /' "$work/err" | head -5
  failures=$((failures + 1))
}
finish() {
  [ $failures = 0 ] && echo "$1: all as expected"
  exit $((failures > 0))
}
