#!/usr/bin/env bash
# Builds the documentation site in build/site; open build/site/index.html.
#
#   scripts/site.sh            install what is missing, build
#   scripts/site.sh --check    also check links, and read all pages in a browser at 1280 and
#                              390 px; pictures are in build/site-pictures
#
#   REPRISE_COMMAND=FILE       describe this command instead of building it
#   REPRISE_SETUP=off          install nothing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup.sh

check=no
case "${1:-}" in
  "") ;;
  --check) check=yes ;;
  --help | -h)
    sed -n '2,/^set/{/^#/{s/^# \{0,1\}//;p}}' "$0"
    exit 0
    ;;
  *)
    say "scripts/site.sh: expected --check or nothing, got $1"
    exit 2
    ;;
esac

install_site_tools
command=${REPRISE_COMMAND:-}
if [ -z "$command" ]; then
  install_build_tools
  build release reprise_command
  command=build/release/tools/reprise/reprise
fi

work=build/site-work
rm -rf "$work" build/site
mkdir -p "$work/help"
"$command" --help >"$work/help/reprise"
sed -n '/^Subcommands:/,/^$/s/^  \([a-z]\+\) .*/\1/p' "$work/help/reprise" |
  while read -r name; do "$command" "$name" --help >"$work/help/$name"; done
(cat docs/site/Doxyfile && echo "OUTPUT_DIRECTORY = $work") | doxygen -
# Sphinx is that of Debian's python3, whichever python3 comes first in PATH.
export REPRISE_VERSION
REPRISE_VERSION=$(sed -n 's/^#define REPRISE_VERSION "\(.*\)"/\1/p' include/reprise/version.h)
/usr/bin/python3 docs/site/assemble.py "$work/source" "$work/xml" "$work/help"
/usr/bin/python3 -m sphinx -q -W --keep-going -b html "$work/source" build/site
rm -rf build/site/.buildinfo build/site/objects.inv
/usr/bin/python3 docs/site/check_site.py build/site
if [ $check = yes ]; then
  /usr/bin/python3 docs/site/check_site.py --browser build/site-pictures build/site
fi
say "the site is in build/site/index.html"
