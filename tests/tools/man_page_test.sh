#!/usr/bin/env bash
# Checks the manual page: every subcommand and every flag of every --help is in it, and it is
# formatted without a warning. Arguments: COMMAND
set -u
. "$(dirname "$0")/expect.sh"

expect 0 man
cp "$work/out" "$work/reprise.1"
has out '.TH REPRISE 1'
LC_ALL=C grep -q '[^ -~]' "$work/reprise.1" && fail "there are characters other than ASCII"
LC_ALL=C.UTF-8 MANROFFSEQ='' MANWIDTH=100 man --warnings=w,mac -l "$work/reprise.1" \
  >"$work/text" 2>"$work/warnings" </dev/null || fail "man fails"
[ -s "$work/warnings" ] && fail "man warns: $(head -3 "$work/warnings")"
tr -d '\b' <"$work/text" | grep -q "NAME" || fail "there is no text"

# plain_text COMMAND: text of its subsection.
subsection() {
  awk -v name="$1" '/^\.S[SH] /{on = ($0 == ".SS " name)} on' "$work/reprise.1" |
    sed 's/\\-/-/g; s/\\f[BIR]//g'
}
expect 0 --help
mapfile -t commands < <(sed -n '/^Subcommands:/,/^$/s/^  \([a-z]*\) .*/\1/p' "$work/out")
[ ${#commands[@]} -ge 10 ] || fail "--help has ${#commands[@]} subcommands"
for command in "${commands[@]}"; do
  expect 0 "$command" --help
  subsection "$command" >"$work/part"
  [ -s "$work/part" ] || fail "no subcommand $command in the page"
  for flag in $(grep -oE '^  (-[a-z],)?--[a-z0-9-]+' "$work/out" | grep -oE -- '--.*'); do
    grep -qE -- "^(-[a-z], )?$flag( |\$)" "$work/part" || fail "no $flag of $command in the page"
  done
done
subsection train >"$work/part"
grep -q '^--precision fp32|bf16|fp16$' "$work/part" || fail "no values of --precision"
grep -q '^Default: fp32$' "$work/part" || fail "no default of --precision"

finish "the manual page"
