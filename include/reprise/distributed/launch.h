#pragma once

#include <functional>
#include <string>
#include <vector>

namespace reprise {

struct LaunchOptions {
  int ranks = 1;
  std::vector<std::string> argv;  ///< path of the program, and its arguments
  /// Seconds that the other ranks have to end by themselves after one has failed.
  double grace_s = 15;
  /// Called with one line that says which rank failed, and how.
  std::function<void(const std::string&)> say{};
};

/// Starts `argv` as `ranks` processes on this machine and waits for all of them. Sets
/// RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (a free
/// port) for each, and OMP_NUM_THREADS to its share of the cores unless that is set. The
/// ranks use this process's standard streams.
///
/// SIGINT and SIGTERM are forwarded to all ranks. If a rank fails, the others are killed
/// after `grace_s`. The ranks are also killed when this process dies. Returns 0 on
/// success; the exit status of the first rank that failed, or 1 if a signal killed it;
/// 128 + N if the ranks ended because of the forwarded signal N. Throws reprise::Error if
/// a process cannot be started, and c10::Error if `options` are invalid. Not thread-safe:
/// signal handlers are process-wide.
int launch_ranks(const LaunchOptions& options);

/// Returns a TCP port that is free on this machine. Another process may take it before
/// it is used. Throws c10::Error if there is none.
int free_port();

}  // namespace reprise
