#pragma once

#include <functional>
#include <optional>
#include <string>

namespace reprise {

/// Which of how many processes this one is, and where they meet.
struct RankInfo {
  int rank = 0;
  int ranks = 1;
  int local_rank = 0;              ///< among those of this machine
  int local_ranks = 1;             ///< on this machine
  std::string host = "127.0.0.1";  ///< where the store is
  int port = 29500;
  /// Whether rank 0 holds the store; false: the launcher does.
  bool serve = true;
  /// Sets one start apart from another in a launcher's store.
  std::string start;
  std::string launcher;  ///< "torchrun", "Open MPI", "Slurm", "PMI"
};

/// What the launcher says in the environment; nothing where none does. In this order:
///
/// - RANK and WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT:
///   torchrun and `reprise launch`
/// - OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE: mpirun of Open MPI
/// - PMI_RANK and PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS: other MPIs
/// - SLURM_PROCID and SLURM_NTASKS, SLURM_LOCALID, SLURM_STEP_NODELIST: srun, where
///   the step has more than one task
///
/// MASTER_ADDR and MASTER_PORT count with every launcher. Without them the address is
/// the first machine of Slurm's list, else this machine's own loopback, and the port
/// is made from the job's number, so that two jobs do not meet. Throws c10::Error,
/// with the variable's name, where one is missing or no such number.
std::optional<RankInfo> place_from_environment(
    const std::function<const char*(const char*)>& variable);
std::optional<RankInfo> place_from_environment();

}  // namespace reprise
