#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace reprise {

/// The position of this process among the ranks, and the address of the
/// rendezvous store.
struct RankInfo {
  int rank = 0;              ///< global rank, 0 <= rank < world_size
  int world_size = 1;        ///< number of ranks
  int local_rank = 0;        ///< rank among the ranks on this machine
  int local_world_size = 1;  ///< number of ranks on this machine
  std::string store_host = "127.0.0.1";
  int store_port = 29500;
  /// Number of ports, from store_port on, of which rank 0 takes the first free one. One
  /// if the port was given.
  int store_ports = 1;
  /// All ranks are on this machine. They then use the loopback address, which other
  /// machines cannot reach, instead of store_host.
  bool one_machine = false;
  /// Distinguishes restarts of the same job.
  std::string run_id;
  std::string launcher;  ///< "torchrun", "Open MPI", "Slurm" or "PMI"
};

/// Reads the launcher's environment variables. Returns nullopt if no launcher
/// has set any. Launchers are tried in this order:
///
/// - torchrun and `reprise launch`: RANK, WORLD_SIZE, LOCAL_RANK,
///   LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
/// - Open MPI's mpirun: OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
/// - other MPIs: PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
/// - srun, if the step has more than one task: SLURM_PROCID, SLURM_NTASKS,
///   SLURM_LOCALID, SLURM_STEP_NODELIST
///
/// MASTER_ADDR and MASTER_PORT are respected with every launcher. Without them,
/// the address is the first node in Slurm's list or the loopback address, and
/// the port is derived from the job id so that concurrent jobs use different
/// ports. torchrun itself listens at MASTER_PORT; the port is then derived from
/// that and the run's id. REPRISE_RANK_PORT has precedence over all of these. Throws
/// c10::Error that names the variable if one is missing or malformed.
///
/// `variable` returns the value of an environment variable, or null if it is not
/// set. The second overload reads the environment of this process.
std::optional<RankInfo> rank_info_from_environment(
    const std::function<const char*(const char*)>& variable);
std::optional<RankInfo> rank_info_from_environment();

struct LaunchOptions {
  int ranks = 1;
  std::vector<std::string> argv;  ///< path of the program, and its arguments
  /// Seconds that the other ranks have to end by themselves after one has failed.
  double grace_s = 15;
  /// Called with one line that says which rank failed, and how.
  std::function<void(const std::string&)> say{};
};

/// Starts `argv` as `ranks` processes on this machine and waits for all of them. Sets
/// RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR (127.0.0.1), MASTER_PORT (a
/// free port) and REPRISE_RANK_TOKEN (a new one) for each, and OMP_NUM_THREADS to its share of the cores unless that is set. The
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
