#!/usr/bin/env bash
# Makes the page that `reprise report` fills with results: web/ and the libraries
# that web/package-lock.json fixes, in one file.
#
#   scripts/page.sh OUT              fails if a library is missing
#   scripts/page.sh --or-reason OUT  then writes the reason into OUT instead
#   scripts/page.sh --fetch          only downloads the libraries, if they are missing
#
#   REPRISE_PAGE=FILE                take this page, made elsewhere
#   REPRISE_DATA=DIR                 keeps the libraries under DIR/web;
#                                    default: ~/.cache/reprise
#   REPRISE_SETUP=off                download nothing, take what is there
#
# Libraries come from npm with the user's own settings (registry, proxy, cache).
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$here/scripts/data.sh"
web=$here/web

# give_up TEXT: the reason, on standard error and for --or-reason.
reason_file=
give_up() {
  # The first reason is the one that counts: others follow from it.
  if [ ! -s "$reason_file" ]; then
    say "no page for reports: $*"
    printf '%s\n' "$*" >"$reason_file"
  fi
  exit 1
}

# library_directory: the libraries' directory, named after the lock file that fixes
# them. It is there whole or not at all.
library_directory() {
  printf '%s/web/%s\n' "$(data_directory)" \
    "$(sha256sum "$web/package-lock.json" | cut -c 1-16)"
}

# fetch_libraries: npm checks each package against the lock file's SHA-512. A
# subshell of its own, for the trap.
fetch_libraries() (
  into=$(library_directory)
  [ -d "$into" ] && exit
  [ "${REPRISE_SETUP:-}" != off ] ||
    give_up "$into is missing, and REPRISE_SETUP=off downloads nothing"
  # A build does not ask for root's password; ./reprise and ./test fetch before it.
  if [ $only_fetch = yes ]; then need_npm; else command -v npm >/dev/null; fi ||
    give_up "npm is missing; install it (Debian: apt-get install npm), then run scripts/page.sh --fetch"
  mkdir -p "${into%/*}" && work=$(mktemp -d "$into.XXXXXX") ||
    give_up "cannot write ${into%/*}; set REPRISE_DATA to a directory that can be written"
  trap 'rm -rf "$work"' EXIT
  trap 'exit 130' INT TERM
  say "getting the page's libraries with npm (about 10 s)"
  cp "$web/package.json" "$web/package-lock.json" "$web/.npmrc" "$work"
  (cd "$work" && npm_quietly npm.log ci) ||
    give_up "npm ci failed: $(npm_reason "$work/npm.log")"
  mkdir "$work/libraries"
  for name in vega vega-lite; do
    cp "$work/node_modules/$name/build/$name.min.js" "$work/libraries/" ||
      give_up "the package $name has no build/$name.min.js"
  done
  # Another process may have been first; its files are as good.
  mv -T "$work/libraries" "$into" 2>/dev/null || [ -d "$into" ] ||
    give_up "cannot write $into"
)

# library NAME: its minified script, without the reference to a map.
library() {
  sed '/^\/\/# sourceMappingURL=/d' "$(library_directory)/$1.min.js"
}

# in_script: standard input as it can stand in a <script>.
in_script() { sed -e 's|</\(script\)|<\\/\1|gI' -e 's|<!--|<\\!--|g'; }

# write_page: REPRISE_PAGE, or the template with each line `@include FILE` and
# `@library NAME` replaced by what it names. A subshell of its own, for give_up.
write_page() (
  if [ -n "${REPRISE_PAGE:-}" ]; then
    cat "$REPRISE_PAGE" || give_up "REPRISE_PAGE: $REPRISE_PAGE cannot be read"
    exit
  fi
  fetch_libraries || exit 1
  while IFS= read -r line || [ -n "$line" ]; do
    case "$line" in
      "@include "*.js) in_script <"$web/${line#@include }" || give_up "web/${line#@include } cannot be read" ;;
      "@include "*) cat "$web/${line#@include }" || give_up "web/${line#@include } cannot be read" ;;
      "@library "*) library "${line#@library }" | in_script || give_up "${line#@library } could not be bundled" ;;
      *) printf '%s\n' "$line" ;;
    esac
  done <"$web/page.html"
)

usage() {
  say "usage: scripts/page.sh [--or-reason] OUT | --fetch"
  exit 2
}

or_reason=no
only_fetch=no
case "${1:-}" in
  --or-reason)
    or_reason=yes
    shift
    ;;
  --fetch) only_fetch=yes ;;
  --*) usage ;;
esac
[ $# -eq 1 ] || usage
out=$1
part=
reason_file=$(mktemp) || exit 1
trap 'rm -f ${part:+"$part"} "$reason_file"' EXIT
trap 'exit 130' INT TERM

if [ $only_fetch = yes ]; then
  [ -n "${REPRISE_PAGE:-}" ] || fetch_libraries
  exit
fi
part=$out.part.$$
if write_page >"$part"; then
  mv -f "$part" "$out"
elif [ $or_reason = yes ] && [ -s "$reason_file" ]; then
  cp "$reason_file" "$out"
else
  exit 1
fi
