#pragma once

#include "support.h"
#include "temporary.h"

#include <reprise/distributed/group.h>
#include <reprise/distributed/launch.h>

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

/// Several processes of this test, each a rank.
///
/// LibTorch's threads do not survive a fork, so each rank is this program started
/// again, with the test's own name as its filter; in_ranks() then runs the body and
/// exits instead of returning.
namespace reprise::testing {

/// Which rank this process is; -1: the test itself.
inline int child_rank() {
  const char* text = std::getenv("REPRISE_TEST_RANK");
  return text == nullptr ? -1 : std::atoi(text);
}

struct RankEnd {
  int status = -1;  ///< of its exit; -1: by a signal
  int signal = 0;   ///< that ended it
  std::chrono::steady_clock::time_point at{};
  std::string error;  ///< what it printed
};

struct InRanks {
  int ranks = 2;
  std::string variant{};  ///< to tell calls of one test apart
  double timeout_s = 10;
  /// Called in the test's own process, with the ranks' process ids.
  std::function<void(const std::vector<pid_t>&)> meanwhile{};
  std::string folder{};  ///< for files; child_folder() in the ranks
};

/// So many, told apart by how many they are.
inline InRanks ranks_in(const std::string& folder, int ranks) {
  InRanks how{.ranks = ranks, .variant = std::to_string(ranks)};
  how.folder = folder;
  return how;
}

inline std::string child_folder() {
  const char* text = std::getenv("REPRISE_TEST_FOLDER");
  return text == nullptr ? "" : text;
}

inline RankGroupOptions group_options(double timeout_s = 10) {
  RankGroupOptions options;
  options.place = *place_from_environment();
  options.timeout_s = timeout_s;
  options.join_timeout_s = 60;
  options.device = device();
  options.backend = "gloo";
  return options;
}

/// Runs `body` in each of so many new processes, and waits for them. In such a
/// process it does not return: status 0 where the body does and no check has failed.
inline std::vector<RankEnd> in_ranks(const InRanks& how,
                                     const std::function<void()>& body) {
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  const std::string name =
      std::string(info->test_suite_name()) + "." + info->name();
  if (child_rank() >= 0) {
    const char* variant = std::getenv("REPRISE_TEST_VARIANT");
    if (variant == nullptr || how.variant != variant) return {};
    at::set_num_threads(1);
    try {
      body();
    } catch (const c10::Error& error) {
      std::fprintf(stderr, "%s\n", error.what_without_backtrace());
      std::_Exit(3);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      std::_Exit(3);
    }
    std::fflush(nullptr);
    std::_Exit(::testing::Test::HasFailure() ? 4 : 0);
  }

  // Theirs too: none of them lives to remove it.
  const TemporaryDirectory scratch;
  const int port = free_port();
  const std::string filter = "--gtest_filter=" + name;
  std::vector<pid_t> pids;
  std::vector<std::string> logs;
  const auto start = std::chrono::steady_clock::now();
  for (int rank = 0; rank < how.ranks; ++rank) {
    logs.push_back(scratch / "log-" + std::to_string(rank));
    const int file =
        open(logs.back().c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    std::vector<std::pair<std::string, std::string>> variables = {
        {"RANK", std::to_string(rank)},
        {"WORLD_SIZE", std::to_string(how.ranks)},
        {"LOCAL_RANK", std::to_string(rank)},
        {"LOCAL_WORLD_SIZE", std::to_string(how.ranks)},
        {"MASTER_ADDR", "127.0.0.1"},
        {"MASTER_PORT", std::to_string(port)},
        {"REPRISE_TEST_RANK", std::to_string(rank)},
        {"REPRISE_TEST_VARIANT", how.variant},
        {"REPRISE_TEST_FOLDER", how.folder},
        {"TMPDIR", scratch.path()},
        {"OMP_NUM_THREADS", "1"}};
    const pid_t pid = fork();
    if (pid == 0) {
      for (const auto& [key, value] : variables) {
        setenv(key.c_str(), value.c_str(), 1);
      }
      dup2(file, STDOUT_FILENO);
      dup2(file, STDERR_FILENO);
      execl("/proc/self/exe", "reprise_tests", filter.c_str(), nullptr);
      _exit(127);
    }
    close(file);
    pids.push_back(pid);
  }
  std::thread beside([&how, pids] {
    if (how.meanwhile) how.meanwhile(pids);
  });
  std::vector<RankEnd> ends(pids.size());
  size_t left = pids.size();
  const auto passed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() -
                                         start)
        .count();
  };
  while (left > 0) {
    for (size_t i = 0; i < pids.size(); ++i) {
      int status = 0;
      if (pids[i] == 0 || waitpid(pids[i], &status, WNOHANG) != pids[i]) {
        continue;
      }
      pids[i] = 0;
      --left;
      if (WIFEXITED(status)) ends[i].status = WEXITSTATUS(status);
      if (WIFSIGNALED(status)) ends[i].signal = WTERMSIG(status);
      ends[i].at = std::chrono::steady_clock::now();
    }
    if (passed() > 120) {
      for (const pid_t pid : pids) {
        if (pid > 0) kill(pid, SIGKILL);
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  beside.join();
  for (size_t i = 0; i < logs.size(); ++i) {
    std::ifstream file(logs[i]);
    ends[i].error.assign(std::istreambuf_iterator<char>(file), {});
  }
  return ends;
}

inline void expect_all_well(const std::vector<RankEnd>& ends) {
  for (size_t i = 0; i < ends.size(); ++i) {
    EXPECT_EQ(ends[i].status, 0) << "rank " << i << ", signal "
                                 << ends[i].signal << ": " << ends[i].error;
  }
}

}  // namespace reprise::testing
