// Trainings with everything in host memory, killed at random moments and resumed. The truth is
// a training that was never stopped, with everything on the device. The killed process is this
// program, running HostKill.Child.
#include "train/step/host_state_runs.h"

#include <reprise/train/run_directory.h>
#include <reprise/train/trainer.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <signal.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

namespace reprise {
namespace {

using testing::Host;
using namespace std::chrono_literals;

constexpr const char* kFolder = "REPRISE_TEST_KILL_FOLDER";

/// Number of kills, for longer runs than usual.
int kill_count() {
  const char* count = std::getenv("REPRISE_TEST_KILLS");
  return count == nullptr ? 12 : std::atoi(count);
}

TrainConfig killed_config(StatePlace place) {
  TrainConfig config = testing::tokens();
  config.clip = 0;
  config.state = place;
  config.model_options.dropout = 0.1;
  config.save_every = 1;
  config.epochs = 0;
  config.steps = 12;
  config.resolve();
  return config;
}

void train_in(const std::string& path, StatePlace place) {
  const TrainConfig config = killed_config(place);
  const bool resume = std::filesystem::exists(path + "/config.json");
  auto directory = resume ? RunDirectory::open(path)
                          : RunDirectory::create(path, to_json(config));
  TrainRun how;
  how.directory = &directory;
  how.resume = resume;
  Trainer(make_inputs(config), config).run(how);
}

NamedTensors last_state(const std::string& path) {
  return detail::newest_state(RunDirectory::open(path),
                              [](const auto&) { FAIL(); })
      ->tensors;
}

TEST(HostKill, Child) {
  const char* folder = std::getenv(kFolder);
  if (folder == nullptr) GTEST_SKIP() << "for the other test";
  const Host host;
  train_in(folder, StatePlace::kHostAll);
}

/// Starts the child. It ends by itself, or after `limit` by SIGKILL. Returns whether it ended
/// by itself.
bool run_child(const std::string& folder, std::chrono::milliseconds limit) {
  const pid_t pid = fork();
  if (pid == 0) {
    ::setenv(kFolder, folder.c_str(), 1);
    ::execl("/proc/self/exe", "reprise_tests", "--gtest_filter=HostKill.Child",
            "--gtest_brief=1", nullptr);
    _exit(127);
  }
  const auto end = std::chrono::steady_clock::now() + limit;
  int status = 0;
  while (waitpid(pid, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() >= end) kill(pid, SIGKILL);
    std::this_thread::sleep_for(1ms);
  }
  if (!WIFEXITED(status)) return false;
  EXPECT_EQ(WEXITSTATUS(status), 0);
  return true;
}

TEST(HostKill, ResumesToTheSameBytes) {
  if (testing::device().is_cuda()) {
    GTEST_SKIP() << "starting so many processes takes minutes there";
  }
  const testing::TemporaryDirectory base;
  const std::string plain = base.path() + "/plain";
  train_in(plain, StatePlace::kDevice);
  const NamedTensors expected = last_state(plain);
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_TRUE(run_child(base.path() + "/whole", 60s));
  const auto whole = std::chrono::steady_clock::now() - begin;
  std::mt19937 random(7);
  std::uniform_real_distribution<> share(0.2, 1.1);
  int kills = 0;
  for (int run = 0; kills < kill_count(); ++run) {
    const std::string folder = base.path() + "/run" + std::to_string(run);
    while (!run_child(folder,
                      std::chrono::duration_cast<std::chrono::milliseconds>(
                          whole * share(random)))) {
      ++kills;
    }
    const NamedTensors got = last_state(folder);
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(testing::same(got[i].second, expected[i].second))
          << run << " " << got[i].first;
    }
  }
}

}  // namespace
}  // namespace reprise
