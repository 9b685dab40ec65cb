#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <sys/types.h>
#include <vector>

/// Starting programs. Every child process is the leader of a new process group, so that
/// an interrupt at the terminal reaches only the parent, and is killed when the thread
/// that started it ends, even if that happens with SIGKILL.
namespace reprise {

/// Where a standard stream of a child process comes from or goes to.
enum class ChildStream {
  kInherit,  ///< the parent's stream
  kPipe,     ///< a pipe to the parent; output only
  kNull,     ///< /dev/null
};

struct ChildOptions {
  ChildStream input = ChildStream::kInherit;
  ChildStream output = ChildStream::kInherit;
  ChildStream error = ChildStream::kInherit;
  /// "NAME=value" for each variable; nullopt: the parent's environment.
  std::optional<std::vector<std::string>> environment{};
  /// RLIMIT_DATA in bytes, so that an allocation fails before the machine runs out of
  /// memory; 0: unlimited.
  int64_t memory_limit = 0;
  /// Makes the kernel kill this process before all others if memory runs out.
  bool first_to_kill = false;
};

/// How a process ended.
struct ProcessEnd {
  int status = -1;  ///< exit status; -1 if it was killed by a signal
  int signal = 0;   ///< signal that killed it; 0 if it exited
};

/// A running child process. Not thread-safe.
class ChildProcess {
 public:
  /// Runs the program at the path argv[0]. Returns when the program has been loaded.
  /// Throws reprise::Error if it cannot be started.
  explicit ChildProcess(const std::vector<std::string>& argv,
                        const ChildOptions& options = {});
  /// Kills the process group with SIGKILL unless the process has ended.
  ~ChildProcess();
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&&) = delete;

  pid_t pid() const { return pid_; }

  /// Read ends of the pipes; -1 for streams that are not kPipe.
  int output() const { return pipes_[0]; }
  int error() const { return pipes_[1]; }

  /// Checks whether the process has ended, without blocking, and returns how; nullopt
  /// while it runs.
  const std::optional<ProcessEnd>& poll();

  /// What poll() saw last: whether the process has ended, or is suspended (SIGSTOP).
  bool ended() const { return end_.has_value(); }
  bool suspended() const { return suspended_; }

  /// Sends a signal to the process, or to its whole process group, unless it has ended.
  void send(int signal) const;
  void send_to_group(int signal) const;

 private:
  pid_t pid_ = -1;
  std::array<int, 2> pipes_{-1, -1};
  std::optional<ProcessEnd> end_;
  bool suspended_ = false;
};

struct ProcessOptions {
  double timeout_s = 0;      ///< 0: unlimited
  int64_t memory_limit = 0;  ///< as in ChildOptions
  /// The program applies the limit itself; see base/memory_limit.h.
  bool limits_itself = false;
  /// Called several times per second; returning true ends the program.
  std::function<bool()> stop{};
  /// Discards standard error instead of capturing it.
  bool discard_error = false;
  /// Bytes of standard output to keep; the rest is discarded.
  size_t output_limit = size_t{64} << 20;
};

struct ProcessResult {
  int status = -1;  ///< exit status; -1 if it was killed by a signal
  int signal = 0;   ///< signal that killed it; 0 if it exited
  bool timed_out = false;
  bool stopped = false;            ///< by `stop`
  bool killed_for_memory = false;  ///< by the kernel's out-of-memory killer
  std::string out;
  std::string error;  ///< last part of its standard error
  double wall_s = 0;
  int64_t rss_peak_bytes = 0;  ///< sampled every 50 ms
};

/// Runs the program at the path argv[0] until it and all holders of its output have ended.
/// Standard input is empty. After a time-out or a stop, the process group gets SIGTERM
/// and, 3 s later, SIGKILL. Throws reprise::Error if the program cannot be started.
ProcessResult run_process(const std::vector<std::string>& argv,
                          const ProcessOptions& options = {});

/// The last line that is not blank; empty if there is none.
std::string last_line(const std::string& text);

/// Joins words into a shell command, quoted if necessary.
std::string shell_line(const std::vector<std::string>& words);

}  // namespace reprise
