#!/usr/bin/env bash
# Makes the page that `reprise report` fills with results: web/ and the libraries
# that web/package-lock.json fixes, in one file.
#
#   scripts/page.sh OUT              fails where a library cannot be had
#   scripts/page.sh --or-reason OUT  then writes the reason into OUT instead
#
#   REPRISE_PAGE=FILE                take this page, made elsewhere
#   REPRISE_DATA=DIR                 keeps what was downloaded under DIR/npm;
#                                    default: ~/.cache/reprise
#   npm_config_registry=URL          where libraries come from, as for npm
#   REPRISE_SETUP=off                download nothing, take what is there
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

# lock_field PACKAGE FIELD: from the lock file, as npm writes it.
lock_field() {
  awk -v package="    \"node_modules/$1\": {" -v field="\"$2\":" '
    $0 == package { inside = 1; next }
    inside && /^    }/ { exit }
    inside && $1 == field { gsub(/[",]/, "", $2); print $2; exit }
  ' "$web/package-lock.json"
}

# has_integrity FILE INTEGRITY: the lock file's, sha512 in base 64.
has_integrity() {
  local expected
  expected=$(printf '%s' "${2#sha512-}" | base64 -d | od -An -v -tx1 | tr -d ' \n')
  [ ${#expected} -eq 128 ] &&
    [ "$(sha512sum "$1" | cut -d ' ' -f 1)" = "$expected" ]
}

# package NAME: the path of its tarball, checked.
package() {
  local version integrity file url part
  version=$(lock_field "$1" version)
  integrity=$(lock_field "$1" integrity)
  [ -n "$version" ] && [ -n "$integrity" ] ||
    give_up "web/package-lock.json does not fix $1"
  file=$(data_directory)/npm/$1-$version.tgz
  if [ -s "$file" ] && has_integrity "$file" "$integrity"; then
    printf '%s\n' "$file"
    return
  fi
  url=$(npm_registry)/$1/-/$1-$version.tgz
  [ "${REPRISE_SETUP:-}" != off ] ||
    give_up "$file is not here, and REPRISE_SETUP=off downloads nothing"
  mkdir -p "${file%/*}" && part=$(mktemp "$file.XXXXXX") ||
    give_up "cannot write ${file%/*}; set REPRISE_DATA to a directory that can be written"
  say "getting $1 $version from $url"
  if ! download "$url" "$part"; then
    rm -f "$part"
    give_up "$url cannot be read"
  fi
  if ! has_integrity "$part" "$integrity"; then
    rm -f "$part"
    give_up "$url is another file than the one in web/package-lock.json (SHA-512)"
  fi
  mv -f "$part" "$file"
  printf '%s\n' "$file"
}

# library NAME: its minified script.
library() {
  local tarball
  tarball=$(package "$1") || exit 1
  # Its map is not here to be looked for.
  tar -xzOf "$tarball" "package/build/$1.min.js" | sed '/^\/\/# sourceMappingURL=/d' ||
    give_up "$tarball has no package/build/$1.min.js"
}

# in_script: standard input as it can stand in a <script>.
in_script() { sed -e 's|</\(script\)|<\\/\1|gI' -e 's|<!--|<\\!--|g'; }

# The template's lines `@include FILE` and `@library NAME` give way to what they
# name.
make_page() {
  local line
  while IFS= read -r line || [ -n "$line" ]; do
    case "$line" in
      "@include "*.js) in_script <"$web/${line#@include }" || give_up "web/${line#@include } cannot be read" ;;
      "@include "*) cat "$web/${line#@include }" || give_up "web/${line#@include } cannot be read" ;;
      "@library "*) library "${line#@library }" | in_script || give_up "${line#@library } could not be bundled" ;;
      *) printf '%s\n' "$line" ;;
    esac
  done <"$web/page.html"
}

or_reason=no
if [ "${1:-}" = --or-reason ]; then
  or_reason=yes
  shift
fi
if [ $# -ne 1 ]; then
  say "usage: scripts/page.sh [--or-reason] OUT"
  exit 2
fi
out=$1
part=$out.part.$$
reason_file=$part.reason
trap 'rm -f "$part" "$reason_file"' EXIT

if [ -n "${REPRISE_PAGE:-}" ]; then
  (cp "$REPRISE_PAGE" "$part" || give_up "REPRISE_PAGE: $REPRISE_PAGE cannot be read")
else
  (make_page >"$part")
fi
status=$?
if [ $status -eq 0 ]; then
  mv -f "$part" "$out"
elif [ $or_reason = yes ] && [ -s "$reason_file" ]; then
  mv -f "$reason_file" "$out"
else
  exit 1
fi
