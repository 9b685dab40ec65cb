#pragma once

#include <functional>
#include <string>
#include <vector>

namespace reprise {

struct LaunchOptions {
  int ranks = 1;
  std::vector<std::string>
      argv;  ///< the program, by its path, and its arguments
  /// Seconds that the others have to end by themselves after one has failed.
  double grace_s = 15;
  /// Told in a line which rank failed, and how.
  std::function<void(const std::string&)> say{};
};

/// Starts `argv` as `ranks` processes on this machine, which meet at a free port
/// (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), and
/// waits for all of them. Their standard streams are this process's. They share its
/// cores: OMP_NUM_THREADS is set to each one's part unless it is set already.
///
/// SIGINT and SIGTERM of this process are handed on to all. If one rank fails, the
/// others are killed after the grace. They die with this process, even if that is
/// killed. Returns 0, or the exit status of the first that failed, 1 if that was ended
/// by a signal; 128 + the number if the ranks ended because of a signal handed on.
/// Throws c10::Error if a process cannot be started.
int launch_ranks(const LaunchOptions& options);

/// A TCP port that is free on this machine now.
int free_port();

}  // namespace reprise
