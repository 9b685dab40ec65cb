#!/usr/bin/env bash
# Makes the Debian packages of a build, installs them in a bare Debian 12 root, uses the
# command, builds examples with the library, and removes the packages again without a trace.
#
#   packaging/smoke_test.sh BUILD-DIR [PACKAGES]   PACKAGES: a directory for the packages
#
#   REPRISE_PACKAGE_CACHE=DIR   keep downloaded packages in DIR for the next time
#
# Needs root, debootstrap and a mirror: the one that apt is configured with. BUILD-DIR is a
# complete build with the system's LibTorch. Takes a few minutes.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$here/scripts/setup.sh"

suite=bookworm
packages=(reprise libreprise-dev)
# What the examples are built with, and what shows the manual page.
tools=(cmake g++ make man-db)

fail() {
  say "smoke test: $*"
  exit 1
}

[ $# -ge 1 ] || fail "expected the build directory"
[ "$(id -u)" -eq 0 ] || fail "needs root, for debootstrap and chroot"
build=$(cd "$1" && pwd)
install_packages debootstrap dpkg-dev file
work=$(mktemp -d)
root=$work/root
out=$(mkdir -p "${2:-$work/packages}" && cd "${2:-$work/packages}" && pwd)
cache=$(mkdir -p "${REPRISE_PACKAGE_CACHE:-$work/cache}/archives/partial" &&
  cd "${REPRISE_PACKAGE_CACHE:-$work/cache}" && pwd)

clean_up() {
  local place
  for place in var/cache/apt/archives proc; do
    if mountpoint -q "$root/$place"; then
      umount "$root/$place" || {
        say "cannot unmount $root/$place; remove $work later"
        return
      }
    fi
  done
  rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

# step TEXT COMMAND...: runs a command with its output in a log, which is shown if it fails.
step() {
  local text=$1 start=$SECONDS
  shift
  "$@" >"$work/log" 2>&1 </dev/null || {
    tail -n 40 "$work/log" >&2
    fail "$text: failed"
  }
  printf 'ok %4d s  %s\n' $((SECONDS - start)) "$text"
}

# inside COMMAND...: runs a command in the root, with a home of its own.
inside() {
  env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp/home LC_ALL=C.UTF-8 TERM=dumb \
    DEBIAN_FRONTEND=noninteractive OMP_NUM_THREADS=2 chroot "$root" "$@"
}
apt() { inside apt-get -y -q --no-install-recommends "$@"; }
# shell LINES: runs lines of bash in the root.
shell() { inside bash -euo pipefail -c "$1"; }

# shows TEXT PATTERN COMMAND...: a step whose output contains the pattern.
shows() {
  local text=$1 pattern=$2
  shift 2
  step "$text" "$@"
  grep -qE -- "$pattern" "$work/log" || {
    tail -n 20 "$work/log" >&2
    fail "$text: no '$pattern' in the output"
  }
}

make_packages() {
  local package
  (cd "$build" && cpack -B "$out") && rm -rf "$out/_CPack_Packages"
  for package in "${packages[@]}"; do
    ls "$out/${package}"_*.deb
  done
}

make_root() {
  local mirror
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' \
    "Codename: $suite" | head -n 1)
  [ -n "$mirror" ] || { echo "apt has no mirror with $suite" && return 1; }
  debootstrap --variant=minbase --cache-dir="$cache/archives" "$suite" "$root" "$mirror"
  apt-config dump Acquire | grep -i proxy >"$root/etc/apt/apt.conf.d/90proxy" || true
  mount -t proc proc "$root/proc"
  mount --bind "$cache/archives" "$root/var/cache/apt/archives"
  mkdir -p "$root/tmp/home" "$root/tmp/packages"
  cp "$out"/*.deb "$root/tmp/packages"
  cp -r "$here/examples" "$root/tmp/examples"
  apt update
}

# snapshot FILE: lists all paths of the root, and the sums of all files outside of /var. Left
# out: what the test itself and apt write.
snapshot() {
  (
    cd "$root"
    find . -xdev \( -path ./tmp -o -path ./proc -o -path ./sys -o -path ./dev \
      -o -path ./run -o -path ./var/cache/apt -o -path ./var/lib/apt \) -prune -o \
      -printf '%p %y %m %l\n' | sort
    find etc usr opt root home srv -xdev -type f -print0 | sort -z | xargs -0 sha256sum
  ) >"$1"
}

# nothing_left: fails if a path of the packages is left that no installed package owns.
nothing_left() {
  local path package
  find "$root" -xdev -path "$root/tmp" -prune -o -name '*reprise*' -print >"$work/left"
  for package in "$out"/*.deb; do
    dpkg-deb -c "$package" | awk '{print $6}' | sed 's|^\.||; s|/$||'
  done | sort -u | while read -r path; do
    [ -n "$path" ] && [ -e "$root$path" ] || continue
    inside dpkg -S "$path" >/dev/null 2>&1 || echo "$path"
  done >>"$work/left"
  inside dpkg-query -W -f='${Package} ${db:Status-Status}\n' "${packages[@]}" 2>/dev/null |
    grep -v 'not-installed$' >>"$work/left" || true
  [ ! -s "$work/left" ] || { cat "$work/left" && return 1; }
}

same_snapshots() { diff "$work/before" "$work/after"; }

completes='. /usr/share/bash-completion/completions/reprise
COMP_WORDS=(reprise train --precision b) COMP_CWORD=3
_reprise
echo "completed: ${COMPREPLY[*]}"'

# example NAME FLAGS: configures and builds a project of examples/ with the installed library.
example() {
  shell "cd /tmp && cmake -S examples/$1 -B build-$1 -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_CXX_FLAGS_RELEASE=-O1 && cmake --build build-$1"
}

step "packages made in $out" make_packages
step "a bare Debian 12 root" make_root
printf '           %s packages, %s\n' "$(inside dpkg-query -W | wc -l)" \
  "$(du -sh --exclude=archives --exclude=proc "$root" | cut -f 1)"

step "apt-get install ./reprise.deb" shell \
  "apt-get -y -q --no-install-recommends install /tmp/packages/reprise_*.deb"
shows "reprise --version" '^LibTorch +1\.13' inside reprise --version
sed 's/^/           /' "$work/log"
shows "reprise devices" '^cpu' inside reprise devices
shows "reprise train" 'peak' shell \
  "cd /tmp && reprise train --model mlp --data random --steps 20 --batch 16 --out run"
shows "reprise train --resume" 'peak' shell "cd /tmp && reprise train --resume run --steps 30"
shows "reprise verify" 'same' inside reprise verify --model tiny-mlp --recompute all,sqrt
shows "bash completes a value" '^completed: bf16$' shell "$completes"

step "apt-get install ${tools[*]} ./libreprise-dev.deb" shell \
  "apt-get -y -q --no-install-recommends install ${tools[*]} /tmp/packages/libreprise-dev_*.deb"
# With a width of its own, man keeps no formatted copy in its cache.
shows "man reprise" 'SUBCOMMANDS' shell "MANWIDTH=100 man -P cat reprise"
step "examples/installed built with find_package(reprise)" example installed
shows "examples/installed runs" 'gradients equal: yes' inside /tmp/build-installed/example
step "examples/plugin built with find_package(reprise)" example plugin
shows "reprise train with the plug-in" 'peak' shell \
  "cd /tmp && reprise train --plugin build-plugin/libforecast.so --model forecast --depth 2 \
    --width 4 --taps 5 --batch 16 --steps 3 --out none"

step "apt-get purge" apt purge "${packages[@]}"
step "nothing of the packages is left" nothing_left
# Once more, because the first installation brought other packages as well.
snapshot "$work/before"
step "apt-get install both again" shell \
  "apt-get -y -q --no-install-recommends install /tmp/packages/*.deb"
step "apt-get purge again" apt purge "${packages[@]}"
snapshot "$work/after"
step "all $(wc -l <"$work/before") paths and sums are as before" same_snapshots
say "smoke test: all as expected, $SECONDS s"
