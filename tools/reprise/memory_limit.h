#pragma once

namespace reprise::command {

/// Applies the limit of memory that a study has set for this process, after the libraries have
/// allocated their buffers. Throws c10::OutOfMemoryError if these exceed it already. Tested by
/// tests/tools/study_command_test.sh.
void apply_memory_limit();

}  // namespace reprise::command
