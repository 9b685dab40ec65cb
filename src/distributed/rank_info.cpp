#include "base/socket.h"

#include <reprise/distributed/launch.h>

#include <c10/util/Exception.h>

#include <cctype>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <string_view>

namespace reprise {
namespace {

using Variable = std::function<const char*(const char*)>;

std::string text_of(const Variable& variable, const char* name) {
  const char* text = variable(name);
  return text == nullptr ? "" : text;
}

int number(const Variable& variable, const char* name, int least, int most) {
  const std::string text = text_of(variable, name);
  int value = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value);
  TORCH_CHECK(error == std::errc() && end == text.data() + text.size() &&
                  value >= least && value <= most,
              "[ranks] expected a number from ", least, " to ", most, " in ",
              name, ", got '", text, "'");
  return value;
}

int number_or(const Variable& variable, const char* name, int otherwise,
              int most) {
  return text_of(variable, name).empty() ? otherwise
                                         : number(variable, name, 0, most);
}

constexpr int kMostRanks = 1 << 20;

struct Names {
  const char* launcher;
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_world_size;
};

constexpr Names kLaunchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID",
     "SLURM_NTASKS_PER_NODE"},
};

/// "node[03-07,9],other" → "node03".
std::string first_machine(const std::string& list) {
  const size_t end = list.find_first_of(",[");
  std::string name = list.substr(0, end);
  if (end == std::string::npos || list[end] == ',') return name;
  for (size_t i = end + 1; i < list.size(); ++i) {
    if (std::isdigit(static_cast<unsigned char>(list[i])) == 0) break;
    name += list[i];
  }
  return name;
}

/// Ports to try if the derived one is taken.
constexpr int kDerivedPorts = 8;

/// A port derived from what is equal on all ranks of a job, and usually different for
/// another job.
int derived_port(const Variable& variable,
                 std::initializer_list<const char*> names) {
  uint32_t hash = 2166136261u;  // FNV-1a
  for (const char* name : names) {
    for (const char c : text_of(variable, name) + "/") {
      hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
    }
  }
  // Below the range of ephemeral ports.
  return 20000 + static_cast<int>(hash % (12000 - kDerivedPorts));
}

void find_store_port(RankInfo& info, const Variable& variable) {
  if (!text_of(variable, "REPRISE_RANK_PORT").empty()) {
    info.store_port = number(variable, "REPRISE_RANK_PORT", 1, 65535);
    return;
  }
  // torchrun's agent has a store of its own at this port.
  const bool taken =
      text_of(variable, "TORCHELASTIC_USE_AGENT_STORE") == "True";
  if (!taken && !text_of(variable, "MASTER_PORT").empty()) {
    info.store_port = number(variable, "MASTER_PORT", 1, 65535);
    return;
  }
  info.store_ports = kDerivedPorts;
  info.store_port =
      taken ? derived_port(variable, {"MASTER_PORT", "TORCHELASTIC_RUN_ID",
                                      "TORCHELASTIC_RESTART_COUNT"})
            : derived_port(variable,
                           {"SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE",
                            "OMPI_MCA_ess_base_jobid", "PMI_ID"});
}

void find_store(RankInfo& info, const Variable& variable, bool all_local) {
  const std::string host = text_of(variable, "MASTER_ADDR");
  const std::string nodes = text_of(variable, "SLURM_STEP_NODELIST");
  if (!host.empty()) {
    info.store_host = host;
  } else if (info.launcher == "Slurm" && !nodes.empty()) {
    info.store_host = first_machine(nodes);
  }
  // Ranks on other machines could not reach a loopback address.
  info.one_machine = all_local || is_loopback_host(info.store_host);
  find_store_port(info, variable);
  if (!text_of(variable, "TORCHELASTIC_RUN_ID").empty()) {
    info.run_id = text_of(variable, "TORCHELASTIC_RUN_ID") + "/" +
                  text_of(variable, "TORCHELASTIC_RESTART_COUNT");
  }
}

}  // namespace

std::optional<RankInfo> rank_info_from_environment(const Variable& variable) {
  for (const Names& names : kLaunchers) {
    if (text_of(variable, names.rank).empty()) continue;
    const bool slurm = std::string_view(names.launcher) == "Slurm";
    // Slurm sets these variables for single-process jobs too.
    if (slurm && number_or(variable, names.world_size, 1, kMostRanks) == 1)
      continue;
    RankInfo info;
    info.launcher = names.launcher;
    info.world_size = number(variable, names.world_size, 1, kMostRanks);
    info.rank = number(variable, names.rank, 0, info.world_size - 1);
    info.local_rank =
        number_or(variable, names.local_rank, info.rank, kMostRanks);
    info.local_world_size = number_or(variable, names.local_world_size,
                                      info.world_size, kMostRanks);
    // Slurm's number of tasks per machine is a limit that it need not reach.
    const bool all_local =
        slurm ? text_of(variable, "SLURM_STEP_NUM_NODES") == "1"
              : text_of(variable, names.local_world_size) ==
                    std::to_string(info.world_size);
    find_store(info, variable, all_local);
    return info;
  }
  return std::nullopt;
}

std::optional<RankInfo> rank_info_from_environment() {
  return rank_info_from_environment(
      [](const char* name) { return std::getenv(name); });
}

}  // namespace reprise
