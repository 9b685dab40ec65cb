#pragma once

#include "mutator.h"
#include "target.h"

#include <cstdint>
#include <string>

namespace reprise::fuzz {

struct Limits {
  double input_s = 10;  ///< per input, on a busy machine
  int64_t single_bytes = int64_t{128} << 20;
  int64_t live_bytes = int64_t{512} << 20;
  size_t message_bytes = 4096;
};

/// What a worker process tells its parent, in shared memory.
struct Progress {
  uint64_t number = 0;  ///< of the current input
  uint64_t accepted = 0, refused = 0;
  char problem[1024] = {};
};

/// Exit status of a worker that has described a problem in Progress.
constexpr int kHasProblem = 3;

/// Runs inputs in this process until `end`, or until `seconds` have passed. Ends the process if
/// an input is a problem: it takes too long (SIGALRM), allocates too much, throws anything but
/// an error of ours, or is refused without the name of its file.
void run_inputs(const Target& target, const Mutator& mutator,
                const std::string& folder, uint64_t end, double seconds,
                Progress& progress);

/// Runs one input. Returns the message that it was refused with; empty if it was accepted.
std::string run_input(const Target& target, const std::string& folder,
                      const std::string& input, Progress& progress);

}  // namespace reprise::fuzz
