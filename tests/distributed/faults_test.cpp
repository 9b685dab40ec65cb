// A rank is killed, stopped, or throws, at random moments of a training: all others
// end in time and say whose fault it was, what was saved is whole, and going on ends
// as if nothing had been. faults.sh repeats it as often as one likes.
#include "ranked_runs.h"

#include <random>

namespace reprise::testing {
namespace {

using Moment = std::chrono::steady_clock::time_point;

constexpr int kRanks = 3;
constexpr double kTimeoutS = 2;
constexpr int64_t kSteps = 60;

enum class Fault { kKilled, kStopped, kThrows };

int times() {
  const char* text = std::getenv("REPRISE_FAULTS");
  return text == nullptr ? 1 : std::atoi(text);
}

unsigned seed() {
  const char* text = std::getenv("REPRISE_FAULTS_SEED");
  return text == nullptr ? 1 : static_cast<unsigned>(std::atoi(text));
}

TrainConfig fault_config(int64_t ranks) {
  TrainConfig config = config_of(kRanks);
  config.optimizer.name = "adamw";
  config.clip = 1;
  config.steps = kSteps;
  config.save_every = 5;
  config.share_among(ranks);
  return config;
}

/// Of one round, the same in all its processes.
struct Fate {
  int victim = 0;
  int64_t backward = 0;  ///< in which it happens
  int64_t delay_us = 0;  ///< after its first layer; for what comes from outside

  Fate(Fault fault, int round) {
    std::mt19937 random(seed() * 1000 + static_cast<unsigned>(round) * 3 +
                        static_cast<unsigned>(fault));
    victim = static_cast<int>(random() % kRanks);
    // Two micro-batches a window; not in the last ones, which might be over first.
    backward = 1 + static_cast<int64_t>(random() % (2 * kSteps - 20));
    delay_us = static_cast<int64_t>(random() % 5000);
  }
};

void strike(Fault fault, const Fate& fate) {
  const auto note = [] { std::ofstream(child_folder() + "/fault"); };
  if (fault == Fault::kThrows) {
    note();
    throw std::runtime_error("no such luck");
  }
  const int number = fault == Fault::kKilled ? SIGKILL : SIGSTOP;
  std::thread([note, number, us = fate.delay_us] {
    std::this_thread::sleep_for(std::chrono::microseconds(us));
    note();
    kill(getpid(), number);
  }).detach();
}

/// Of a rank.
void train_to_fault(Fault fault, const Fate& fate, const std::string& name) {
  const auto group = RankGroup::join(group_options(kTimeoutS));
  const TrainConfig config = fault_config(kRanks);
  std::optional<RunDirectory> directory;
  if (group->rank() == 0) {
    directory.emplace(
        RunDirectory::create(child_folder() + "/" + name, config));
  }
  Trainer trainer(make_inputs(config), config, {.ranks = group});
  if (group->rank() == fate.victim) {
    torch::Tensor weight = trainer.model().root->parameters().front();
    const auto backward = std::make_shared<int64_t>(0);
    weight.register_hook([&, backward](const torch::Tensor&) {
      if (++*backward == fate.backward) strike(fault, fate);
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

struct Struck {
  std::vector<RankEnd> ends;
  double after_s = 0;  ///< until the last of the others was gone
};

Struck struck(Fault fault, const Fate& fate, InRanks how,
              const std::string& name) {
  how.variant = name;
  Moment began;
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
    const auto victim = static_cast<size_t>(fate.victim);
    for (size_t r = 0; r < pids.size(); ++r) {
      while (r != victim && kill(pids[r], 0) == 0 && pause()) {
      }
    }
    kill(pids[victim], SIGKILL);
  };
  Struck result;
  result.ends = in_ranks(how, [&] { train_to_fault(fault, fate, name); });
  for (size_t r = 0; r < result.ends.size(); ++r) {
    if (static_cast<int>(r) == fate.victim && fault != Fault::kThrows) continue;
    result.after_s = std::max(
        result.after_s,
        std::chrono::duration<double>(result.ends[r].at - began).count());
  }
  std::remove((how.folder + "/fault").c_str());
  return result;
}

void check_ends(Fault fault, const Fate& fate, const Struck& struck) {
  for (int r = 0; r < kRanks; ++r) {
    const RankEnd& end = struck.ends[static_cast<size_t>(r)];
    if (r == fate.victim) {
      EXPECT_EQ(end.signal, fault == Fault::kThrows ? 0 : SIGKILL);
      if (fault == Fault::kThrows) {
        EXPECT_EQ(end.status, 3);
      }
      continue;
    }
    EXPECT_EQ(end.status, 1) << end.error;
    std::string line = "rank " + std::to_string(fate.victim);
    if (fault == Fault::kThrows) line += " failed: no such luck";
    EXPECT_NE(end.error.find(line), std::string::npos)
        << "rank " << r << ": " << end.error;
  }
  // The time-out, and what a busy machine adds to it.
  EXPECT_LT(struck.after_s, kTimeoutS + 2);
}

void run_rounds(Fault fault, const char* word) {
  const TemporaryDirectory folder;
  InRanks how{.ranks = kRanks};
  how.folder = folder.path();
  how.variant = "whole";
  const auto whole_ends = in_ranks(how, [] {
    const auto group = RankGroup::join(group_options());
    train(group, {.config = fault_config(kRanks), .name = "whole"});
    group->leave();
  });
  std::optional<Ended> whole;
  if (child_rank() < 0) {
    expect_all_well(whole_ends);
    whole = ended(folder.path(), "whole");
  }
  std::vector<double> after;
  int unsaved = 0;
  for (int round = 0; round < times(); ++round) {
    const Fate fate(fault, round);
    const std::string name = std::to_string(round);
    SCOPED_TRACE(std::string(word) + ", round " + name + ": rank " +
                 std::to_string(fate.victim) + ", backward " +
                 std::to_string(fate.backward));
    const Struck found = struck(fault, fate, how, name);
    if (child_rank() < 0) {
      check_ends(fault, fate, found);
      after.push_back(found.after_s);
      const auto saved =
          RunDirectory::open(folder / name).newest([](const std::string& text) {
            ADD_FAILURE() << "not whole: " << text;
          });
      if (!saved) ++unsaved;
      ASSERT_EQ(std::system(("cp -r " + (folder / name) + " " +
                             (folder / (name + "-other")))
                                .c_str()),
                0);
    }
    how.variant = name + "-resumed";
    const auto ends = in_ranks(how, [&] { resume(kRanks, name); });
    // By another number of ranks: two, or one, in turn.
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
      "faults: %s %d times, time-out %g s: all gone after %.2f s (median), "
      "%.2f s (most); %d before the first state\n",
      word, times(), kTimeoutS, after[after.size() / 2], after.back(), unsaved);
}

TEST(Faults, ARankIsKilled) {
  run_rounds(Fault::kKilled, "killed");
}

TEST(Faults, ARankIsStopped) {
  run_rounds(Fault::kStopped, "stopped");
}

TEST(Faults, ARankThrows) {
  run_rounds(Fault::kThrows, "throws");
}

}  // namespace
}  // namespace reprise::testing
