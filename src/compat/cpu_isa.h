#pragma once

#include <string>

/// Prevents oneDNN from using processor features that the system forbids.
///
/// On some virtual machines the processor advertises AMX, but a tile instruction kills
/// the process with SIGILL. oneDNN relies on the advertisement and crashes at its first
/// bf16 product. Therefore, when this library is loaded, and so before the first call of
/// oneDNN, a child process tries a tile instruction if AMX is advertised. If the child
/// dies, ONEDNN_MAX_CPU_ISA is set to AVX512_CORE_BF16. A value set by the user, also
/// under the older name DNNL_MAX_CPU_ISA, is never changed.
///
/// For tests, REPRISE_SIMULATE_AMX=usable or =forbidden simulates that AMX is advertised
/// and that the child survives or dies. REPRISE_LOG=debug prints a line on standard error
/// if oneDNN was limited.
namespace reprise::compat {

enum class AmxSupport {
  kAbsent,     ///< not advertised by the processor
  kUsable,     ///< a tile instruction ran
  kForbidden,  ///< advertised, but a tile instruction killed its process
};

/// The result determined when the library was loaded.
AmxSupport amx_support();

/// The limit that was set for oneDNN; empty if none was set.
const std::string& onednn_isa_limit();

}  // namespace reprise::compat
