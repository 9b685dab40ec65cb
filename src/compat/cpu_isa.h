#pragma once

#include <string>

/// Keeps oneDNN away from processor features that the system forbids.
///
/// Virtual machines exist whose processor advertises AMX while its tile instructions
/// end a process with SIGILL. oneDNN believes the advertisement and dies at its first
/// bf16 product. When this library is loaded, and so before the first call of oneDNN,
/// a child process tries a tile instruction if AMX is advertised. If the child dies,
/// ONEDNN_MAX_CPU_ISA is set to AVX512_CORE_BF16. A value that the user set, also
/// under the older name DNNL_MAX_CPU_ISA, is never changed.
///
/// For tests, REPRISE_SIMULATE_AMX=usable or =forbidden pretends that AMX is
/// advertised and that the child lives or dies. REPRISE_LOG=debug prints a line on
/// standard error if oneDNN was limited.
namespace reprise::compat {

enum class AmxSupport {
  kAbsent,     ///< the processor does not advertise it
  kUsable,     ///< a tile instruction ran
  kForbidden,  ///< advertised, but a tile instruction ended its process
};

/// The answer found when the library was loaded.
AmxSupport amx_support();

/// The limit that was set for oneDNN; empty if it was left alone.
const std::string& onednn_isa_limit();

}  // namespace reprise::compat
