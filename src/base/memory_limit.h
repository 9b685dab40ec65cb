#pragma once

#include <cstdint>

/// A limit of memory that a program applies to itself. One that is there from the start would
/// also apply to what libraries allocate when they are loaded, and OpenBLAS tries for ever to
/// allocate its buffers. ProcessOptions::limits_itself passes the limit to the program.
namespace reprise {

/// Environment variable with a limit in bytes.
constexpr const char* kMemoryLimitVariable = "REPRISE_MEMORY_LIMIT";

/// The limit in the environment; 0 if there is none.
int64_t memory_limit_from_environment();

/// Bytes that count for the limit: private memory that can be written, whether it is used or
/// not. 0 if the system does not say.
int64_t limited_memory_bytes();

/// Lets allocations fail that would exceed `bytes`, in this process and its children.
void limit_memory(int64_t bytes);

}  // namespace reprise
