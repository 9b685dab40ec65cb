#!/usr/bin/env bash
# Builds the page template of `reprise report` from web/ and the libraries pinned by
# web/package-lock.json, as one file.
#
#   scripts/page.sh OUT              fails if a library is missing
#   scripts/page.sh --or-reason OUT  writes the reason into OUT in that case
#   scripts/page.sh --fetch          only downloads missing libraries
#
#   REPRISE_PAGE=FILE                use this page, built elsewhere
#   REPRISE_DATA=DIR                 store the libraries in DIR/web;
#                                    default: ~/.cache/reprise
#   REPRISE_SETUP=off                download nothing; use existing files only
#
# Libraries are downloaded with npm and the user's npm settings (registry, proxy, cache).
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$here/scripts/data.sh"
web=$here/web

# give_up TEXT: prints the reason, and stores it for --or-reason.
reason_file=
give_up() {
  # Only the first reason is reported: later ones follow from it.
  if [ ! -s "$reason_file" ]; then
    say "no page for reports: $*"
    printf '%s\n' "$*" >"$reason_file"
  fi
  exit 1
}

# library_directory: the directory of the libraries, named after the hash of the lock file.
# It is created atomically.
library_directory() {
  printf '%s/web/%s\n' "$(data_directory)" \
    "$(sha256sum "$web/package-lock.json" | cut -c 1-16)"
}

# fetch_libraries: downloads the libraries. npm verifies them against the SHA-512 sums of the
# lock file. Runs in a subshell, for the trap.
fetch_libraries() (
  into=$(library_directory)
  [ -d "$into" ] && exit
  [ "${REPRISE_SETUP:-}" != off ] ||
    give_up "$into is missing, and REPRISE_SETUP=off downloads nothing"
  # A build must not ask for a password; ./reprise and ./test install npm before it.
  if [ $only_fetch = yes ]; then need_npm; else command -v npm >/dev/null; fi ||
    give_up "npm is missing; install it (Debian: apt-get install npm), then run scripts/page.sh --fetch"
  mkdir -p "${into%/*}" && work=$(mktemp -d "$into.XXXXXX") ||
    give_up "cannot write ${into%/*}; set REPRISE_DATA to a directory that can be written"
  trap 'rm -rf "$work"' EXIT
  trap 'exit 130' INT TERM
  say "downloading the libraries of the page with npm (about 10 s)"
  cp "$web/package.json" "$web/package-lock.json" "$web/.npmrc" "$work"
  (cd "$work" && npm_quietly npm.log ci) ||
    give_up "npm ci failed: $(npm_reason "$work/npm.log")"
  mkdir "$work/libraries"
  for name in vega vega-lite; do
    cp "$work/node_modules/$name/build/$name.min.js" "$work/libraries/" ||
      give_up "the package $name has no build/$name.min.js"
  done
  # Another process may have been first; its files are equivalent.
  mv -T "$work/libraries" "$into" 2>/dev/null || [ -d "$into" ] ||
    give_up "cannot write $into"
)

# library NAME: prints its minified script without the reference to a source map.
library() {
  sed '/^\/\/# sourceMappingURL=/d' "$(library_directory)/$1.min.js"
}

# in_script: escapes standard input for use in a <script>.
in_script() { sed -e 's|</\(script\)|<\\/\1|gI' -e 's|<!--|<\\!--|g'; }

# write_page: prints REPRISE_PAGE, or the template with the lines `@include FILE` and
# `@library NAME` expanded. Runs in a subshell, for give_up.
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
