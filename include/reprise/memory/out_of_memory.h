#pragma once

#include <c10/util/Exception.h>

namespace reprise {

/// Whether `error` reports that memory ran out: of a CUDA device, of pinned memory, of a
/// CUDA library or of the CPU. The CPU allocator and the libraries throw no specific type;
/// their errors are recognised by their text.
bool is_out_of_memory(const c10::Error& error);

}  // namespace reprise
