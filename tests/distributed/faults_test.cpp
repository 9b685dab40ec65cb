// A rank is killed, stopped or throws at a random point of a training. All other ranks
// must end in time and name the faulty rank, the saved states must be valid, and the
// resumed run must end with the same state. If a rank runs out of memory, all ranks repeat
// the window, and the run ends as without the failure. faults.sh runs more rounds.
#include "ranked_runs.h"

#include <random>

namespace reprise::testing {
namespace {

using TimePoint = std::chrono::steady_clock::time_point;

constexpr int kRanks = 3;
constexpr double kTimeoutS = 2;
constexpr int64_t kSteps = 60;

enum class Fault { kKilled, kStopped, kThrows };

int rounds() {
  const char* text = std::getenv("REPRISE_FAULTS");
  return text == nullptr ? 1 : std::atoi(text);
}

unsigned seed() {
  const char* text = std::getenv("REPRISE_FAULTS_SEED");
  return text == nullptr ? 1 : static_cast<unsigned>(std::atoi(text));
}

Sharding level() {
  const char* text = std::getenv("REPRISE_FAULTS_SHARD");
  return text == nullptr ? Sharding::kNone : from_text<Sharding>(text);
}

TrainConfig fault_config(int64_t ranks) {
  TrainConfig config = config_of(kRanks);
  config.optimizer.name = "adamw";
  config.clip = 1;
  config.steps = kSteps;
  config.save_every = 5;
  config.shard = level();
  config.share_among(ranks);
  return config;
}

/// The random choices of one round; equal in all of its processes.
struct FaultPlan {
  int victim = 0;
  int64_t backward = 0;  ///< number of the backward in which the fault occurs
  int64_t delay_us =
      0;  ///< for signals: delay after the first layer's gradient

  FaultPlan(Fault fault, int round) {
    std::mt19937 random(seed() * 1000 + static_cast<unsigned>(round) * 3 +
                        static_cast<unsigned>(fault));
    victim = static_cast<int>(random() % kRanks);
    // Two micro-batches per window. The last windows are excluded: the training might
    // end before them.
    backward = 1 + static_cast<int64_t>(random() % (2 * kSteps - 20));
    delay_us = static_cast<int64_t>(random() % 5000);
  }
};

void inject(Fault fault, const FaultPlan& plan) {
  const auto note = [] { std::ofstream(child_folder() + "/fault"); };
  if (fault == Fault::kThrows) {
    note();
    throw std::runtime_error("injected error");
  }
  const int number = fault == Fault::kKilled ? SIGKILL : SIGSTOP;
  std::thread([note, number, us = plan.delay_us] {
    std::this_thread::sleep_for(std::chrono::microseconds(us));
    note();
    kill(getpid(), number);
  }).detach();
}

/// Trains as one rank and injects the fault if this rank is the victim.
void train_to_fault(Fault fault, const FaultPlan& plan,
                    const std::string& name) {
  const auto group = RankGroup::join(group_options(kTimeoutS));
  const TrainConfig config = fault_config(kRanks);
  std::optional<RunDirectory> directory;
  if (group->rank() == 0) {
    directory.emplace(
        RunDirectory::create(child_folder() + "/" + name, to_json(config)));
  }
  Trainer trainer(make_inputs(config), config, {.ranks = group});
  if (group->rank() == plan.victim) {
    torch::Tensor weight = trainer.model().root->parameters().front();
    const auto backward = std::make_shared<int64_t>(0);
    weight.register_hook([&, backward](const torch::Tensor&) {
      if (++*backward == plan.backward) inject(fault, plan);
    });
  }
  TrainRun run;
  run.directory = directory ? &*directory : nullptr;
  trainer.run(run);
}

void resume(int64_t ranks, const std::string& name) {
  const auto group = RankGroup::join(group_options());
  train(group, {.config = fault_config(ranks), .name = name, .resume = true});
  group->leave();
}

struct RoundOutcome {
  std::vector<RankEnd> ends;
  double ended_after_s = 0;  ///< until the last other rank ended
};

RoundOutcome run_with_fault(Fault fault, const FaultPlan& plan, InRanks how,
                            const std::string& name) {
  how.variant = name;
  TimePoint began;
  how.meanwhile = [&](const std::vector<pid_t>& pids) {
    const auto until =
        std::chrono::steady_clock::now() + std::chrono::seconds(60);
    const auto pause = [&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      return std::chrono::steady_clock::now() < until;
    };
    while (access((how.folder + "/fault").c_str(), F_OK) != 0 && pause()) {
    }
    began = std::chrono::steady_clock::now();
    if (fault != Fault::kStopped) return;
    const auto victim = static_cast<size_t>(plan.victim);
    for (size_t r = 0; r < pids.size(); ++r) {
      while (r != victim && kill(pids[r], 0) == 0 && pause()) {
      }
    }
    kill(pids[victim], SIGKILL);
  };
  RoundOutcome result;
  result.ends = in_ranks(how, [&] { train_to_fault(fault, plan, name); });
  for (size_t r = 0; r < result.ends.size(); ++r) {
    if (static_cast<int>(r) == plan.victim && fault != Fault::kThrows) continue;
    result.ended_after_s = std::max(
        result.ended_after_s,
        std::chrono::duration<double>(result.ends[r].at - began).count());
  }
  std::remove((how.folder + "/fault").c_str());
  return result;
}

void check_ends(Fault fault, const FaultPlan& plan,
                const RoundOutcome& outcome) {
  for (int r = 0; r < kRanks; ++r) {
    const RankEnd& end = outcome.ends[static_cast<size_t>(r)];
    if (r == plan.victim) {
      EXPECT_EQ(end.signal, fault == Fault::kThrows ? 0 : SIGKILL);
      if (fault == Fault::kThrows) {
        EXPECT_EQ(end.status, 3);
      }
      continue;
    }
    EXPECT_EQ(end.status, 1) << end.error;
    std::string line = "rank " + std::to_string(plan.victim);
    if (fault == Fault::kThrows) line += " failed: injected error";
    EXPECT_NE(end.error.find(line), std::string::npos)
        << "rank " << r << ": " << end.error;
  }
  // The time-out, plus a margin for a busy machine.
  EXPECT_LT(outcome.ended_after_s, kTimeoutS + 2);
}

/// Trains without a fault, in the directory "whole". Returns nothing in a rank's process.
std::optional<Ended> train_undisturbed(InRanks how) {
  how.variant = "whole";
  const auto ends = in_ranks(
      how, [] { train({.config = fault_config(kRanks), .name = "whole"}); });
  if (child_rank() >= 0) return std::nullopt;
  expect_all_well(ends);
  return ended(how.folder, "whole");
}

void run_rounds(Fault fault, const char* kind) {
  const TemporaryDirectory folder;
  InRanks how{.ranks = kRanks};
  how.folder = folder.path();
  const std::optional<Ended> whole = train_undisturbed(how);
  std::vector<double> after;
  int unsaved = 0;
  for (int round = 0; round < rounds(); ++round) {
    const FaultPlan plan(fault, round);
    const std::string name = std::to_string(round);
    SCOPED_TRACE(std::string(kind) + ", round " + name + ": rank " +
                 std::to_string(plan.victim) + ", backward " +
                 std::to_string(plan.backward));
    const RoundOutcome found = run_with_fault(fault, plan, how, name);
    if (child_rank() < 0) {
      check_ends(fault, plan, found);
      after.push_back(found.ended_after_s);
      const auto saved = detail::newest_state(
          RunDirectory::open(folder / name), [](const std::string& text) {
            ADD_FAILURE() << "invalid state: " << text;
          });
      if (!saved) ++unsaved;
      ASSERT_EQ(std::system(("cp -r " + (folder / name) + " " +
                             (folder / (name + "-other")))
                                .c_str()),
                0);
    }
    how.variant = name + "-resumed";
    const auto ends = in_ranks(how, [&] { resume(kRanks, name); });
    // Resumed with a different number of ranks, two or one in turn.
    InRanks other = how;
    other.ranks = 1 + (round + 1) % 2;
    other.variant = name + "-other";
    const auto other_ends =
        in_ranks(other, [&] { resume(other.ranks, other.variant); });
    if (child_rank() >= 0) continue;
    expect_all_well(ends);
    expect_all_well(other_ends);
    expect_equal(*whole, ended(folder.path(), name));
    expect_near(*whole, ended(folder.path(), other.variant), 1e-4);
  }
  if (child_rank() >= 0) return;
  std::sort(after.begin(), after.end());
  std::printf(
      "faults: %s, %d rounds, time-out %g s: all ranks ended after %.2f s "
      "(median), "
      "%.2f s (maximum); %d rounds before the first saved state\n",
      kind, rounds(), kTimeoutS, after[after.size() / 2], after.back(),
      unsaved);
}

TEST(Faults, KilledRankEndsAllAndTheRunResumes) {
  run_rounds(Fault::kKilled, "killed");
}

TEST(Faults, StoppedRankEndsAllAndTheRunResumes) {
  run_rounds(Fault::kStopped, "stopped");
}

TEST(Faults, ThrowingRankEndsAllAndTheRunResumes) {
  run_rounds(Fault::kThrows, "throws");
}

TEST(Faults, RankOutOfMemoryRepeatsTheWindow) {
  if (device().is_cuda()) {
    GTEST_SKIP() << "this test injects CPU allocation failures";
  }
  const TemporaryDirectory folder;
  InRanks how{.ranks = kRanks};
  how.folder = folder.path();
  const std::optional<Ended> whole = train_undisturbed(how);
  std::mt19937 random(seed());
  for (int round = 0; round < rounds(); ++round) {
    const int victim = static_cast<int>(random() % kRanks);
    const auto after = static_cast<int64_t>(20 + random() % 3500);
    const std::string name = std::to_string(round);
    SCOPED_TRACE("round " + name + ": rank " + std::to_string(victim) +
                 ", allocation " + std::to_string(after));
    how.variant = name;
    const auto ends = in_ranks(how, [&] {
      train({.config = fault_config(kRanks),
             .name = name,
             .failing_rank = victim,
             .failing_after = after});
    });
    if (child_rank() >= 0) continue;
    expect_all_well(ends);
    expect_equal(*whole, ended(folder.path(), name));
  }
  if (child_rank() >= 0) return;
  std::printf("faults: out of memory, %d rounds, all as without\n", rounds());
}

}  // namespace
}  // namespace reprise::testing
