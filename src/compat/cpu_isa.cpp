#include "compat/cpu_isa.h"

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace reprise::compat {
namespace {

constexpr char kLimit[] = "AVX512_CORE_BF16";

/// The answer that a test simulates; null if the processor is to be asked.
const char* simulated() {
  return std::getenv("REPRISE_SIMULATE_AMX");
}

bool is(const char* text, const char* expected) {
  return text != nullptr && std::strcmp(text, expected) == 0;
}

bool advertises_amx() {
  if (simulated() != nullptr) return true;
#if defined(__x86_64__)
  constexpr unsigned kAmxBf16 = 1U << 22;
  constexpr unsigned kAmxTile = 1U << 24;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  return (d & (kAmxBf16 | kAmxTile)) != 0;
#else
  return false;
#endif
}

/// Runs in a child process, which exits with status 0 or is killed by a signal.
[[noreturn]] void try_tiles() {
  // The parent's handlers must not catch the signal.
  std::signal(SIGILL, SIG_DFL);
  std::signal(SIGSEGV, SIG_DFL);
  if (is(simulated(), "forbidden")) __builtin_trap();
  if (simulated() != nullptr) _exit(0);
#if defined(__x86_64__)
  // On Linux a process must request permission to use tiles: arch_prctl(2).
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) _exit(1);
  // Palette 1, one tile of 16 rows of 64 bytes. The instructions are written as bytes
  // because older assemblers do not know their names.
  alignas(64) uint8_t config[64] = {1};
  config[16] = 64;
  config[48] = 16;
  asm volatile(
      ".byte 0xc4, 0xe2, 0x78, 0x49, 0x00\n\t"  // ldtilecfg (%rax)
      ".byte 0xc4, 0xe2, 0x7b, 0x49, 0xc0\n\t"  // tilezero %tmm0
      ".byte 0xc4, 0xe2, 0x78, 0x49, 0xc0"      // tilerelease
      :
      : "a"(config)
      : "memory");
#endif
  _exit(0);
}

AmxSupport find_support() {
  if (!advertises_amx()) return AmxSupport::kAbsent;
  // Not base/process.h: the child runs no program, only code of this library, and
  // everything before main() must work without argv or files.
  const pid_t child = fork();
  if (child == 0) try_tiles();
  int status = 0;
  // If the child cannot be started or waited for, the limit is the safe answer.
  const bool ran = child > 0 && waitpid(child, &status, 0) == child &&
                   WIFEXITED(status) && WEXITSTATUS(status) == 0;
  return ran ? AmxSupport::kUsable : AmxSupport::kForbidden;
}

struct Answer {
  AmxSupport support = find_support();
  std::string limit{};

  Answer() {
    if (support != AmxSupport::kForbidden) return;
    if (std::getenv("ONEDNN_MAX_CPU_ISA") != nullptr ||
        std::getenv("DNNL_MAX_CPU_ISA") != nullptr) {
      return;
    }
    setenv("ONEDNN_MAX_CPU_ISA", kLimit, /*overwrite=*/0);
    limit = kLimit;
    if (is(std::getenv("REPRISE_LOG"), "debug")) {
      std::fprintf(
          stderr,
          "reprise: the processor advertises AMX, but its tile "
          "instructions cannot be used here; oneDNN is limited to %s\n",
          kLimit);
    }
  }
};

const Answer& answer() {
  static const Answer found;
  return found;
}

// Initialized when the library is loaded, because oneDNN reads its limit once, at its
// first call.
[[maybe_unused]] const Answer& g_found_at_load = answer();

}  // namespace

AmxSupport amx_support() {
  return answer().support;
}

const std::string& onednn_isa_limit() {
  return answer().limit;
}

}  // namespace reprise::compat
