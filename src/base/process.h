#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

/// One program, run to its end, whatever that end is.
namespace reprise {

struct ProcessOptions {
  double timeout_s = 0;  ///< 0: none
  /// Most that its data may take of the machine's memory (RLIMIT_DATA), so that
  /// an allocation fails instead of the machine; 0: any.
  int64_t memory_limit = 0;
  /// Asked several times a second; true ends the program.
  std::function<bool()> stop{};
};

struct ProcessResult {
  int status = -1;  ///< of its exit; -1: it did not exit by itself
  int signal = 0;   ///< that ended it
  bool timed_out = false;
  bool stopped = false;            ///< by `stop`
  bool killed_for_memory = false;  ///< by the kernel
  std::string out;
  std::string error;  ///< the end of its standard error
  double wall_s = 0;
  int64_t rss_peak_bytes = 0;  ///< as seen every 50 ms
};

/// The last line of a text that says something; empty: none does.
std::string last_line(const std::string& text);

/// Words as a shell reads them: quoted where they must be.
std::string shell_line(const std::vector<std::string>& words);

/// Runs argv[0] with its arguments and standard input empty. The program dies
/// with this process, even where that one is killed. Throws c10::Error where it
/// cannot be started.
ProcessResult run_process(const std::vector<std::string>& argv,
                          const ProcessOptions& options = {});

}  // namespace reprise
