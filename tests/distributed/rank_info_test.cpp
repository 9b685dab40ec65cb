#include "support.h"

#include <reprise/distributed/launch.h>

#include <map>

namespace reprise::testing {
namespace {

std::optional<RankInfo> rank_info_in(
    const std::map<std::string, std::string>& variables) {
  return rank_info_from_environment([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

TEST(RankInfo, IsEmptyWithoutALauncher) {
  EXPECT_FALSE(rank_info_in({}));
  EXPECT_FALSE(rank_info_in({{"MASTER_ADDR", "node1"}}));
  // Slurm sets the variables for a batch script with a single task too.
  EXPECT_FALSE(rank_info_in({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}}));
}

TEST(RankInfo, ReadsTorchrun) {
  const auto info = rank_info_in({{"RANK", "3"},
                                  {"WORLD_SIZE", "4"},
                                  {"LOCAL_RANK", "1"},
                                  {"LOCAL_WORLD_SIZE", "2"},
                                  {"MASTER_ADDR", "node1"},
                                  {"MASTER_PORT", "12345"},
                                  {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                  {"TORCHELASTIC_RUN_ID", "run"},
                                  {"TORCHELASTIC_RESTART_COUNT", "2"}});
  ASSERT_TRUE(info);
  EXPECT_EQ(info->launcher, "torchrun");
  EXPECT_EQ(info->rank, 3);
  EXPECT_EQ(info->world_size, 4);
  EXPECT_EQ(info->local_rank, 1);
  EXPECT_EQ(info->local_world_size, 2);
  EXPECT_EQ(info->store_host, "node1");
  EXPECT_FALSE(info->one_machine);
  // torchrun itself listens at MASTER_PORT.
  EXPECT_NE(info->store_port, 12345);
  EXPECT_GT(info->store_port, 1024);
  EXPECT_GT(info->store_ports, 1);
  EXPECT_EQ(info->run_id, "run/2");
}

TEST(RankInfo, PortsOfTorchrunDifferByRunAndRestart) {
  std::map<std::string, std::string> variables = {
      {"RANK", "0"},
      {"WORLD_SIZE", "2"},
      {"LOCAL_WORLD_SIZE", "2"},
      {"MASTER_ADDR", "node1"},
      {"MASTER_PORT", "29500"},
      {"TORCHELASTIC_USE_AGENT_STORE", "True"},
      {"TORCHELASTIC_RUN_ID", "none"},
      {"TORCHELASTIC_RESTART_COUNT", "0"}};
  const auto first = rank_info_in(variables);
  EXPECT_TRUE(first->one_machine);
  EXPECT_EQ(rank_info_in(variables)->store_port, first->store_port);
  for (const char* name :
       {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}) {
    auto other = variables;
    other[name] = "29501";
    EXPECT_NE(rank_info_in(other)->store_port, first->store_port) << name;
  }
  variables["REPRISE_RANK_PORT"] = "4321";
  EXPECT_EQ(rank_info_in(variables)->store_port, 4321);
  EXPECT_EQ(rank_info_in(variables)->store_ports, 1);
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "False";
  variables.erase("REPRISE_RANK_PORT");
  EXPECT_EQ(rank_info_in(variables)->store_port, 29500);
  EXPECT_EQ(rank_info_in(variables)->store_ports, 1);
}

TEST(RankInfo, KnowsWhetherAllRanksAreOnOneMachine) {
  const auto one_machine = [](std::map<std::string, std::string> variables) {
    return rank_info_in(variables)->one_machine;
  };
  std::map<std::string, std::string> torchrun = {
      {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "10.0.0.1"}};
  EXPECT_FALSE(one_machine(torchrun));
  torchrun["LOCAL_WORLD_SIZE"] = "1";
  EXPECT_FALSE(one_machine(torchrun));
  torchrun["LOCAL_WORLD_SIZE"] = "2";
  EXPECT_TRUE(one_machine(torchrun));
  torchrun["LOCAL_WORLD_SIZE"] = "1";
  for (const char* host : {"localhost", "127.0.0.1", "::1"}) {
    torchrun["MASTER_ADDR"] = host;
    EXPECT_TRUE(one_machine(torchrun)) << host;
  }
  std::map<std::string, std::string> slurm = {
      {"SLURM_PROCID", "0"},
      {"SLURM_NTASKS", "2"},
      {"SLURM_NTASKS_PER_NODE", "2"},
      {"SLURM_STEP_NODELIST", "gpu[1-2]"}};
  EXPECT_FALSE(one_machine(slurm));
  slurm["SLURM_STEP_NUM_NODES"] = "1";
  EXPECT_TRUE(one_machine(slurm));
}

TEST(RankInfo, ReadsOpenMpi) {
  std::map<std::string, std::string> variables = {
      {"OMPI_COMM_WORLD_RANK", "1"},
      {"OMPI_COMM_WORLD_SIZE", "2"},
      {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
      {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
      {"PMIX_NAMESPACE", "123"}};
  const auto info = rank_info_in(variables);
  ASSERT_TRUE(info);
  EXPECT_EQ(info->launcher, "Open MPI");
  EXPECT_EQ(info->rank, 1);
  EXPECT_EQ(info->store_host, "127.0.0.1");
  EXPECT_TRUE(info->one_machine);
  EXPECT_GT(info->store_port, 1024);
  EXPECT_EQ(rank_info_in(variables)->store_port, info->store_port);
  variables["PMIX_NAMESPACE"] = "124";
  EXPECT_NE(rank_info_in(variables)->store_port, info->store_port);
}

TEST(RankInfo, ReadsSlurm) {
  const auto info =
      rank_info_in({{"SLURM_PROCID", "5"},
                    {"SLURM_NTASKS", "8"},
                    {"SLURM_LOCALID", "1"},
                    {"SLURM_NTASKS_PER_NODE", "4"},
                    {"SLURM_JOB_ID", "77"},
                    {"SLURM_STEP_NODELIST", "gpu[03-04,09],big1"}});
  ASSERT_TRUE(info);
  EXPECT_EQ(info->launcher, "Slurm");
  EXPECT_EQ(info->rank, 5);
  EXPECT_EQ(info->world_size, 8);
  EXPECT_EQ(info->local_rank, 1);
  EXPECT_EQ(info->local_world_size, 4);
  EXPECT_EQ(info->store_host, "gpu03");
  for (const char* nodes : {"big1,gpu[03-04]", "big1"}) {
    EXPECT_EQ(rank_info_in({{"SLURM_PROCID", "0"},
                            {"SLURM_NTASKS", "2"},
                            {"SLURM_STEP_NODELIST", nodes}})
                  ->store_host,
              "big1");
  }
}

TEST(RankInfo, ReadsOtherMpis) {
  const auto info = rank_info_in(
      {{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MASTER_PORT", "4000"}});
  ASSERT_TRUE(info);
  EXPECT_EQ(info->launcher, "PMI");
  EXPECT_EQ(info->world_size, 2);
  EXPECT_EQ(info->store_port, 4000);
}

TEST(RankInfo, NamesTheVariableThatIsWrong) {
  const auto wrong = [](std::map<std::string, std::string> variables) {
    return error_of([&] { rank_info_in(variables); });
  };
  EXPECT_NE(wrong({{"RANK", "2"}, {"WORLD_SIZE", "2"}}).find("RANK, got '2'"),
            std::string::npos);
  EXPECT_NE(wrong({{"RANK", "0"}}).find("WORLD_SIZE"), std::string::npos);
  EXPECT_NE(wrong({{"RANK", "x"}, {"WORLD_SIZE", "2"}}).find("got 'x'"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise::testing
