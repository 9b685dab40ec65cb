#include "compat/process_group.h"
#include "ranks.h"
#include "temporary.h"

namespace reprise::testing {
namespace {

TEST(Group, RunsCollectives) {
  expect_all_well(in_ranks({.ranks = 3}, [] {
    const auto group = RankGroup::join(group_options());
    const int r = group->rank();
    ASSERT_EQ(group->size(), 3);
    EXPECT_EQ(group->all_reduce_max({r, -r, 7}),
              (std::vector<int64_t>{2, 0, 7}));
    EXPECT_EQ(group->all_reduce_sum({0.5 * r, 1}),
              (std::vector<double>{1.5, 3}));
    EXPECT_EQ(group->broadcast_text(r == 0 ? "first" : "another"), "first");
    EXPECT_EQ(group->broadcast_text(r == 0 ? "" : "another"), "");

    auto tensor = torch::arange(5, torch::kInt) * (r + 1);
    auto wide = torch::full({2, 3}, double(r), torch::kDouble).t();
    group->broadcast({tensor, wide, torch::empty({0})});
    EXPECT_TRUE(tensor.equal(torch::arange(5, torch::kInt)));
    EXPECT_TRUE(wide.equal(torch::zeros({3, 2}, torch::kDouble)));

    RankGroup::NamedList list;
    if (r == 0) {
      list = {{"a", torch::ones({2, 2}, torch::kBFloat16)},
              {"count", torch::scalar_tensor(41, torch::kLong)}};
    }
    group->broadcast_named(list);
    ASSERT_EQ(list.size(), 2u);
    EXPECT_EQ(list[0].first, "a");
    EXPECT_TRUE(list[0].second.equal(torch::ones({2, 2}, torch::kBFloat16)));
    EXPECT_EQ(list[1].second.item<int64_t>(), 41);

    auto sum = torch::full({4}, double(r + 1)).to(device());
    auto work = group->all_reduce(sum);
    group->wait(work);
    EXPECT_TRUE(sum.cpu().equal(torch::full({4}, 6.0)));

    // Rank r receives chunk r of every rank's input.
    const auto input = (torch::arange(6) + 10 * r).to(torch::kBFloat16);
    auto output = torch::empty_like(input);
    work = group->all_to_all(output, input);
    group->wait(work);
    const auto expected = torch::tensor(
        {2 * r, 2 * r + 1, 10 + 2 * r, 11 + 2 * r, 20 + 2 * r, 21 + 2 * r});
    EXPECT_TRUE(output.equal(expected.to(torch::kBFloat16)));

    auto all = torch::empty({3, 2});
    work = group->all_gather(all, torch::full({2}, double(r)));
    group->wait(work);
    EXPECT_TRUE(all.select(1, 0).equal(torch::arange(3).to(torch::kFloat)));
    group->leave();
  }));
}

TEST(Group, ReportsABrokenConnectionAsAnErrorNotASignal) {
  expect_all_well(in_ranks({.ranks = 2}, [] {
    const auto group = RankGroup::join(group_options());
    int ends[2] = {};
    ASSERT_EQ(pipe(ends), 0);
    close(ends[0]);
    EXPECT_EQ(write(ends[1], "x", 1), -1);
    EXPECT_EQ(errno, EPIPE);
    close(ends[1]);
    group->leave();
  }));
}

TEST(Group, RejectsADifferentConfigurationByName) {
  const auto ends = in_ranks({.ranks = 3}, [] {
    auto options = group_options();
    options.must_match = {
        {"--model", child_rank() == 2 ? "gpt2" : "bert-base"}};
    RankGroup::join(options);
  });
  for (const RankEnd& end : ends) {
    EXPECT_EQ(end.status, 3);
    EXPECT_NE(end.error.find("rank 2 has --model gpt2, rank 0 has bert-base"),
              std::string::npos)
        << end.error;
  }
}

TEST(Group, NamesARankThatDoesNotArrive) {
  const auto ends = in_ranks({.ranks = 2}, [] {
    if (child_rank() == 1) return;
    auto options = group_options();
    options.join_timeout_s = 1;
    RankGroup::join(options);
  });
  EXPECT_EQ(ends[0].status, 3);
  EXPECT_NE(ends[0].error.find("rank 1 has not arrived within 1 s"),
            std::string::npos)
      << ends[0].error;
}

/// RankGroupOptions::timeout_s in these tests.
constexpr double kGroupTimeoutS = 1.5;

/// A fault to inject: a signal to `rank`, or a call on it.
struct InjectedFault {
  int rank = 0;
  int signal = 0;
  std::function<void(RankGroup&)> action{};
};

struct FaultOutcome {
  std::vector<RankEnd> ends;
  double ended_after_s =
      0;  ///< from the signal to the end of the last other rank
};

/// Runs all-reduces on all ranks until the fault is injected into one of them.
FaultOutcome with_fault(int ranks, const InjectedFault& fault) {
  const TemporaryDirectory folder;
  InRanks setup{.ranks = ranks};
  setup.folder = folder.path();
  FaultOutcome outcome;
  std::chrono::steady_clock::time_point began;
  setup.meanwhile = [&](const std::vector<pid_t>& pids) {
    if (fault.signal == 0) return;
    for (int r = 0; r < ranks; ++r) {
      while (access((folder / std::to_string(r)).c_str(), F_OK) != 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    }
    const pid_t pid = pids[static_cast<size_t>(fault.rank)];
    began = std::chrono::steady_clock::now();
    kill(pid, fault.signal);
    if (fault.signal != SIGSTOP) return;
    // Killed once the other ranks have ended.
    for (const pid_t other : pids) {
      while (other != pid && kill(other, 0) == 0 &&
             std::chrono::steady_clock::now() - began <
                 std::chrono::duration<double>(kGroupTimeoutS + 5)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    }
    kill(pid, SIGKILL);
  };
  outcome.ends = in_ranks(setup, [&] {
    const auto group = RankGroup::join(group_options(kGroupTimeoutS));
    auto tensor = torch::zeros({1000});
    for (int i = 0;; ++i) {
      if (i == 20) {
        std::ofstream(child_folder() + "/" + std::to_string(group->rank()));
        if (group->rank() == fault.rank && fault.action) fault.action(*group);
      }
      auto work = group->all_reduce(tensor);
      group->wait(work);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  });
  for (size_t r = 0; r < outcome.ends.size(); ++r) {
    if (static_cast<int>(r) == fault.rank || fault.signal == 0) continue;
    outcome.ended_after_s = std::max(
        outcome.ended_after_s,
        std::chrono::duration<double>(outcome.ends[r].at - began).count());
  }
  return outcome;
}

/// Expects every rank except `faulty_rank` to end with an error that contains `text`.
void expect_reported(const FaultOutcome& outcome, int faulty_rank,
                     const std::string& text) {
  for (int r = 0; r < static_cast<int>(outcome.ends.size()); ++r) {
    if (r == faulty_rank) continue;
    const RankEnd& end = outcome.ends[static_cast<size_t>(r)];
    EXPECT_EQ(end.status, 1) << "signal " << end.signal << ": " << end.error;
    EXPECT_NE(end.error.find(text), std::string::npos)
        << "rank " << r << ": " << end.error;
  }
  // The time-out, plus a margin for a busy machine.
  EXPECT_LT(outcome.ended_after_s, kGroupTimeoutS + 2.5);
}

TEST(Group, EndsAllRanksIfOneIsKilled) {
  expect_reported(with_fault(3, {.rank = 1, .signal = SIGKILL}), 1,
                  "rank 1 has not answered");
}

TEST(Group, EndsAllRanksIfRankZeroIsKilled) {
  expect_reported(with_fault(3, {.rank = 0, .signal = SIGKILL}), 0, "rank 0");
}

TEST(Group, EndsAllRanksIfOneIsStopped) {
  expect_reported(with_fault(2, {.rank = 1, .signal = SIGSTOP}), 1,
                  "rank 1 has not answered");
}

TEST(Group, EndsAllRanksIfRankZeroIsStopped) {
  expect_reported(with_fault(2, {.rank = 0, .signal = SIGSTOP}), 0, "rank 0");
}

TEST(Group, EndsAllRanksIfOneFails) {
  const auto outcome =
      with_fault(3, {.rank = 1, .action = [](RankGroup& group) {
                       group.fail("rank 1 failed: injected error");
                       TORCH_CHECK(false, "injected error");
                     }});
  expect_reported(outcome, 1, "rank 1 failed: injected error");
  if (child_rank() < 0) {
    EXPECT_EQ(outcome.ends[1].status, 3);
  }
}

TEST(Group, EndsAllRanksIfOneMakesNoProgress) {
  const auto outcome =
      with_fault(2, {.rank = 1, .action = [](RankGroup& group) {
                       group.heartbeat();
                       std::this_thread::sleep_for(std::chrono::seconds(30));
                     }});
  expect_reported(outcome, -1, "rank 1 has made no progress for 1.5 s");
}

}  // namespace
}  // namespace reprise::testing
