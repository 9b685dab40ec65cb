#include "ranks.h"

#include <reprise/torch/version.h>

namespace reprise::testing {
namespace {

TEST(Group, AddsUpAndSendsOn) {
  expect_all_well(in_ranks({.ranks = 3}, [] {
    const auto group = RankGroup::join(group_options());
    const int r = group->rank();
    ASSERT_EQ(group->size(), 3);
    EXPECT_EQ(group->largest({r, -r, 7}), (std::vector<int64_t>{2, 0, 7}));
    EXPECT_EQ(group->total({0.5 * r, 1}), (std::vector<double>{1.5, 3}));
    EXPECT_EQ(group->from_first(r == 0 ? "first" : "another"), "first");
    EXPECT_EQ(group->from_first(r == 0 ? "" : "another"), "");

    auto tensor = torch::arange(5, torch::kInt) * (r + 1);
    auto wide = torch::full({2, 3}, double(r), torch::kDouble).t();
    group->copy_from_first({tensor, wide, torch::empty({0})});
    EXPECT_TRUE(tensor.equal(torch::arange(5, torch::kInt)));
    EXPECT_TRUE(wide.equal(torch::zeros({3, 2}, torch::kDouble)));

    RankGroup::NamedList list;
    if (r == 0) {
      list = {{"a", torch::ones({2, 2}, torch::kBFloat16)},
              {"count", torch::scalar_tensor(41, torch::kLong)}};
    }
    group->send_from_first(list);
    ASSERT_EQ(list.size(), 2u);
    EXPECT_EQ(list[0].first, "a");
    EXPECT_TRUE(list[0].second.equal(torch::ones({2, 2}, torch::kBFloat16)));
    EXPECT_EQ(list[1].second.item<int64_t>(), 41);

    auto sum = torch::full({4}, double(r + 1)).to(device());
    auto work = group->sum(sum);
    group->wait(work);
    EXPECT_TRUE(sum.cpu().equal(torch::full({4}, 6.0)));

    // Part r of each, by rank.
    const auto input = (torch::arange(6) + 10 * r).to(torch::kBFloat16);
    auto output = torch::empty_like(input);
    work = group->all_to_all(output, input);
    group->wait(work);
    const auto expected = torch::tensor({2 * r, 2 * r + 1, 10 + 2 * r,
                                         11 + 2 * r, 20 + 2 * r, 21 + 2 * r});
    EXPECT_TRUE(output.equal(expected.to(torch::kBFloat16)));

    auto all = torch::empty({3, 2});
    work = group->all_gather(all, torch::full({2}, double(r)));
    group->wait(work);
    EXPECT_TRUE(all.select(1, 0).equal(torch::arange(3).to(torch::kFloat)));
    group->leave();
  }));
}

TEST(Group, RefusesAnotherConfigurationByName) {
  const auto ends = in_ranks({.ranks = 3}, [] {
    auto options = group_options();
    options.same = {{"--model", child_rank() == 2 ? "gpt2" : "bert-base"}};
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

/// All ranks add up for ever; one of them meets its fate.
std::vector<RankEnd> with_fault(int ranks, const std::string& variant,
                                const std::function<void(RankGroup&)>& at_fate,
                                int fated, int signal) {
  InRanks how{.ranks = ranks, .variant = variant};
  how.meanwhile = [&](const std::vector<pid_t>& pids) {
    if (signal == 0) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(2500));
    kill(pids[static_cast<size_t>(fated)], signal);
    if (signal != SIGSTOP) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(4500));
    kill(pids[static_cast<size_t>(fated)], SIGKILL);
  };
  return in_ranks(how, [&] {
    const auto group = RankGroup::join(group_options(/*timeout_s=*/2));
    auto tensor = torch::zeros({1000});
    for (int i = 0;; ++i) {
      if (i == 50 && group->rank() == fated && at_fate) at_fate(*group);
      auto work = group->sum(tensor);
      group->wait(work);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  });
}

void expect_named(const std::vector<RankEnd>& ends, int fated,
                  const std::string& text, double within_s) {
  for (int r = 0; r < static_cast<int>(ends.size()); ++r) {
    if (r == fated) continue;
    const RankEnd& end = ends[static_cast<size_t>(r)];
    EXPECT_EQ(end.status, 1) << end.error;
    EXPECT_LT(end.wall_s, within_s);
    EXPECT_NE(end.error.find(text), std::string::npos)
        << "rank " << r << ": " << end.error;
  }
}

TEST(Group, EndsWithOneThatIsKilled) {
  const auto ends = with_fault(3, "", {}, 1, SIGKILL);
  expect_named(ends, 1, "rank 1 has not answered", 7);
}

TEST(Group, EndsWithTheFirstThatIsKilled) {
  const auto ends = with_fault(2, "", {}, 0, SIGKILL);
  expect_named(ends, 0, "rank 0", 7);
}

TEST(Group, EndsWithOneThatIsStopped) {
  const auto ends = with_fault(2, "", {}, 1, SIGSTOP);
  expect_named(ends, 1, "rank 1 has not answered", 7);
}

TEST(Group, EndsWithTheFirstThatIsStopped) {
  const auto ends = with_fault(2, "", {}, 0, SIGSTOP);
  expect_named(ends, 0, "rank 0", 7);
}

TEST(Group, EndsWithOneThatFails) {
  const auto fails = [](RankGroup& group) {
    group.fail("rank 1 failed: no such luck");
    TORCH_CHECK(false, "no such luck");
  };
  const auto ends = with_fault(3, "", fails, 1, 0);
  expect_named(ends, 1, "rank 1 failed: no such luck", 7);
  EXPECT_EQ(ends[1].status, 3);
}

TEST(Group, EndsWithOneThatMakesNoStep) {
  const auto hangs = [](RankGroup& group) {
    group.step();
    std::this_thread::sleep_for(std::chrono::seconds(30));
  };
  const auto ends = with_fault(2, "", hangs, 1, 0);
  expect_named(ends, -1, "rank 1 has made no step for 2 s", 9);
}

}  // namespace
}  // namespace reprise::testing
