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

/// Runs the body of a test in several processes, one per rank.
///
/// LibTorch's threads do not survive a fork, so each rank executes this program
/// again, with the name of the test as its filter. There, in_ranks() runs the body and
/// exits instead of returning.
namespace reprise::testing {

/// The rank of this process, or -1 in the process of the test itself.
inline int child_rank() {
  const char* text = std::getenv("REPRISE_TEST_RANK");
  return text == nullptr ? -1 : std::atoi(text);
}

struct RankEnd {
  int status = -1;  ///< exit status; -1 if a signal ended the process
  int signal = 0;   ///< the signal that ended the process; 0: none
  std::chrono::steady_clock::time_point at{};
  std::string error;  ///< output of the process
};

struct InRanks {
  int ranks = 2;
  std::string variant{};  ///< distinguishes several calls in one test
  double timeout_s = 10;
  /// Called in the process of the test with the process ids of the ranks.
  std::function<void(const std::vector<pid_t>&)> meanwhile{};
  std::string folder{};  ///< for files; ranks get it from child_folder()
};

/// Options for `ranks` ranks, with a variant of its own.
inline InRanks ranks_in(const std::string& folder, int ranks) {
  InRanks options{.ranks = ranks, .variant = std::to_string(ranks)};
  options.folder = folder;
  return options;
}

inline std::string child_folder() {
  const char* text = std::getenv("REPRISE_TEST_FOLDER");
  return text == nullptr ? "" : text;
}

inline RankGroupOptions group_options(double timeout_s = 10) {
  RankGroupOptions options;
  options.rank_info = *rank_info_from_environment();
  options.timeout_s = timeout_s;
  options.join_timeout_s = 60;
  options.device = device();
  options.backend = "gloo";
  return options;
}

/// Runs `body` in `options.ranks` new processes and waits for them. Does not return in
/// these processes; their exit status is 0 if the body returns and no check has failed.
inline std::vector<RankEnd> in_ranks(const InRanks& options,
                                     const std::function<void()>& body) {
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  const std::string name =
      std::string(info->test_suite_name()) + "." + info->name();
  if (child_rank() >= 0) {
    const char* variant = std::getenv("REPRISE_TEST_VARIANT");
    if (variant == nullptr || options.variant != variant) return {};
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

  // The ranks use it too; they end without removing their own.
  const TemporaryDirectory scratch;
  const int port = free_port();
  const std::string filter = "--gtest_filter=" + name;
  std::vector<pid_t> pids;
  std::vector<std::string> logs;
  const auto start = std::chrono::steady_clock::now();
  for (int rank = 0; rank < options.ranks; ++rank) {
    logs.push_back(scratch / "log-" + std::to_string(rank));
    const int file =
        open(logs.back().c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    std::vector<std::pair<std::string, std::string>> variables = {
        {"RANK", std::to_string(rank)},
        {"WORLD_SIZE", std::to_string(options.ranks)},
        {"LOCAL_RANK", std::to_string(rank)},
        {"LOCAL_WORLD_SIZE", std::to_string(options.ranks)},
        {"MASTER_ADDR", "127.0.0.1"},
        {"MASTER_PORT", std::to_string(port)},
        {"REPRISE_TEST_RANK", std::to_string(rank)},
        {"REPRISE_TEST_VARIANT", options.variant},
        {"REPRISE_TEST_FOLDER", options.folder},
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
  std::thread beside([&options, pids] {
    if (options.meanwhile) options.meanwhile(pids);
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
