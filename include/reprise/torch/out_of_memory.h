#pragma once

#include <c10/util/Exception.h>

namespace reprise::compat {

/// True where `error` says that memory ran out: of a CUDA device, of pinned
/// memory, of a CUDA library's own, or of the CPU. The CPU's allocator and the
/// libraries have no type of error for it and are told by their text.
bool is_out_of_memory(const c10::Error& error);

/// Marks a piece of work on this thread that must not fail half-way, and whose
/// memory was set aside just before. Failures that are injected (memory/failure.h)
/// pass it over: neither counted nor made. That is an assumption, not a proof: a
/// real allocator may refuse even here, such as a scalar of eight bytes.
class ReservedScope {
 public:
  ReservedScope();
  ~ReservedScope();
  ReservedScope(const ReservedScope&) = delete;
  ReservedScope& operator=(const ReservedScope&) = delete;

  static bool active();  ///< on this thread
};

}  // namespace reprise::compat
