#pragma once

#include <c10/util/Exception.h>

namespace reprise {

/// Returns whether `error` reports an out-of-memory condition of a CUDA device,
/// of pinned memory, of a CUDA library or of the CPU. The CPU allocator and the
/// libraries throw no specific exception type; their errors are recognized by
/// their message.
bool is_out_of_memory(const c10::Error& error);

}  // namespace reprise
