# Sourced by ./reprise and ./test: installs the packages that the build needs.
#
#   REPRISE_TORCH=DIR   build with this LibTorch instead of Debian's
#   REPRISE_SETUP=off   install nothing; use installed packages only

# say TEXT: prints a message to standard error.
say() { printf 'reprise: %s\n' "$*" >&2; }

# True if REPRISE_TORCH is set, or if python3 can import a torch with CMake files.
has_own_libtorch() {
  [ -n "${REPRISE_TORCH:-}" ] && return 0
  case "${CMAKE_PREFIX_PATH:-}" in *orch*) return 0 ;; esac
  python3 - 2>/dev/null <<'PY'
import os, sys, torch
sys.exit(not os.path.exists(torch.utils.cmake_prefix_path + "/Torch/TorchConfig.cmake"))
PY
}

is_installed() {
  [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

# install_packages NAME...: installs the missing ones of these Debian packages.
install_packages() {
  [ "${REPRISE_SETUP:-}" = off ] && return 0
  command -v dpkg-query >/dev/null || {
    say "not a Debian system: cannot check for $*"
    return 0
  }
  local missing=() name
  for name in "$@"; do is_installed "$name" || missing+=("$name"); done
  [ ${#missing[@]} -eq 0 ] && return 0

  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
      say "these packages are missing, and only root or sudo can install them:"
      say "  apt-get install --no-install-recommends ${missing[*]}"
      return 1
    fi
    as_root=(sudo)
  fi
  say "installing ${missing[*]}"
  # Package lists may be missing or outdated on a fresh machine.
  "${as_root[@]}" apt-get update -qq >&2 || say "apt-get update failed; continuing"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
    --no-install-recommends "${missing[@]}" >&2 || {
    say "could not install: ${missing[*]}"
    return 1
  }
}

# install_build_tools: installs the packages for ./reprise.
install_build_tools() {
  local packages=(g++ cmake ninja-build ca-certificates curl
    libcli11-dev libfmt-dev nlohmann-json3-dev libyaml-cpp-dev zlib1g-dev)
  # The CMake files of libtorch-dev need gflags, glog and protobuf. The BLAS that it depends
  # on by default is 30 times slower than OpenBLAS.
  has_own_libtorch || packages+=(libtorch-dev libopenblas0-pthread)
  install_packages "${packages[@]}"
}

# install_test_tools: installs the additional packages for ./test.
install_test_tools() {
  # The page of reports is tested in a browser, which needs a font; models from Python are
  # compared with PyTorch; completion is tested in each shell, and the manual page with man.
  install_packages libgtest-dev libbenchmark-dev clang-format cppcheck \
    python3 python3-torch git chromium fonts-dejavu-core man-db zsh fish
}

# install_fuzz_tools: installs the additional packages for ./test --fuzz.
install_fuzz_tools() {
  install_packages clang libclang-rt-14-dev
}

# install_site_tools: installs the packages for scripts/site.sh.
install_site_tools() {
  install_packages python3-sphinx python3-myst-parser furo doxygen chromium fonts-dejavu-core
}

# build PRESET TARGET [CMAKE-OPTION...]: builds TARGET and shows the progress on standard
# error. Configures first if there is no build directory or options are given. The log is
# build/PRESET.log.
build() {
  local preset=$1 target=$2 log="build/$1.log" status=0
  shift 2
  mkdir -p build
  # Before the build, whose messages are not shown. The build continues without the page.
  scripts/page.sh --fetch || say "building without the page for reports"
  : >"$log"
  if [ $# -gt 0 ] || [ ! -f "build/$preset/build.ninja" ]; then
    say "configuring; the log is $log"
    cmake --preset "$preset" "$@" >>"$log" 2>&1 || status=$?
  fi
  if [ $status -eq 0 ]; then
    show_progress "$log" &
    local shower=$!
    cmake --build --preset "$preset" --target "$target" >>"$log" 2>&1 || status=$?
    kill "$shower" 2>/dev/null
    wait "$shower" 2>/dev/null || true
  fi
  [ $status -eq 0 ] && return 0
  tail -n 60 "$log" >&2
  say "the build failed; its complete output is in $log"
  return 1
}

# show_progress LOG: shows the last step that ninja has written to LOG until it is killed:
# one updating line on a terminal, otherwise one line per 20 seconds. Prints nothing if the
# build is up to date.
show_progress() {
  local log=$1 start=$SECONDS next=0 step
  # An interrupted build may end without killing this process.
  while kill -0 $$ 2>/dev/null; do
    sleep 1
    step=$(tail -n 5 "$log" | sed -n 's|^\[\([0-9]*\)/\([0-9]*\)\].*|step \1 of \2|p' | tail -n 1)
    [ -n "$step" ] || continue
    if [ -t 2 ]; then
      printf '\rreprise: building, %s, %d s \033[K' "$step" $((SECONDS - start)) >&2
      trap 'printf "\n" >&2; exit 0' TERM
    elif [ $((SECONDS - start)) -ge $next ]; then
      say "building, $step, $((SECONDS - start)) s"
      next=$((SECONDS - start + 20))
    fi
  done
}
