#include "support.h"

#include <reprise/recompute/simulate.h>
#include <reprise/recompute/strategy.h>

#include <algorithm>
#include <map>

namespace reprise {
namespace {

TEST(Strategy, ParsesWhatItPrints) {
  for (const char* text :
       {"none", "all", "every:3", "checkpoints:0", "sqrt", "revolve:6"}) {
    EXPECT_EQ(Strategy::parse(text).to_text(), text);
  }
}

TEST(Strategy, RejectsUnknownNames) {
  for (const char* text : {"", "some", "every", "every:", "every:x", "every:2x",
                           "none:1", "sqrt:2", "Every:2"}) {
    EXPECT_THROW(Strategy::parse(text), c10::Error) << text;
  }
}

TEST(Strategy, ListsTheNamesThatItParses) {
  EXPECT_EQ(strategy_names(),
            (std::vector<std::string>{"none", "all", "sqrt", "every:K",
                                      "checkpoints:K", "revolve:S"}));
  for (std::string name : strategy_names()) {
    if (name.find(':') != std::string::npos) name.back() = '2';
    EXPECT_EQ(Strategy::parse(name).to_text(), name);
  }
}

std::vector<std::string> texts_of(const std::vector<Strategy>& strategies) {
  std::vector<std::string> texts;
  for (const Strategy& one : strategies) texts.push_back(one.to_text());
  return texts;
}

TEST(Strategy, ListsThoseOfAChain) {
  EXPECT_EQ(texts_of(strategies_for(1)),
            (std::vector<std::string>{"none", "all", "sqrt", "every:1",
                                      "checkpoints:0", "revolve:1"}));
  EXPECT_EQ(texts_of(strategies_for(2)),
            (std::vector<std::string>{"none", "all", "sqrt", "every:1",
                                      "checkpoints:0", "revolve:1", "every:2",
                                      "checkpoints:1", "revolve:2"}));
}

TEST(Strategy, ListsValidOnesForLongChains) {
  for (const int stages : {64, 65, 200, 201, 400}) {
    int revolve_with_one_slot = 0;
    const auto list = strategies_for(stages);
    for (const Strategy& one : list) {
      EXPECT_EQ(make_schedule(one, stages).stages(), stages);
      revolve_with_one_slot += one == Strategy::parse("revolve:1");
    }
    // All numbers up to 64 stages, then at most 70 of each kind.
    EXPECT_EQ(list.size() == 3 + 3 * 64, stages == 64) << stages;
    EXPECT_LE(list.size(), 3u + 3 * 70) << stages;
    EXPECT_EQ(revolve_with_one_slot, stages <= 200) << stages;
  }
}

TEST(Strategy, SamplesOfEveryKindAreValidForThreeStages) {
  std::map<StrategyKind, int> samples;
  for (const Strategy& one : sample_strategies()) {
    EXPECT_NO_THROW(make_schedule(one, 3)) << one.to_text();
    ++samples[one.kind];
  }
  EXPECT_EQ(samples.size(), strategy_names().size());
}

TEST(Strategy, RejectsNumbersOutOfRange) {
  EXPECT_NE(testing::error_of([] {
              make_schedule("every:9", 8);
            }).find("between 1 and 8 in 'every:9' for a chain of 8 stages"),
            std::string::npos);
  EXPECT_THROW(make_schedule("every:0", 8), c10::Error);
  EXPECT_THROW(make_schedule("checkpoints:8", 8), c10::Error);
  EXPECT_THROW(make_schedule("checkpoints:-1", 8), c10::Error);
  EXPECT_THROW(make_schedule("revolve:0", 8), c10::Error);
  EXPECT_THROW(make_schedule("none", 0), c10::Error);
}

TEST(Strategy, SmallSchedulesMatchHandCalculation) {
  EXPECT_EQ(make_schedule("none", 3).to_text(), "K0 K1 K2 B2 B1 B0");
  EXPECT_EQ(make_schedule("all", 3).to_text(), "I0 I1 K2 B2 K1 X2 B1 K0 X1 B0");
  EXPECT_EQ(make_schedule("every:2", 3).to_text(),
            "I0 D1 K2 B2 K0 K1 X2 B1 B0");
  EXPECT_EQ(make_schedule("checkpoints:0", 2).to_text(),
            "I0 D1 K0 K1 X2 B1 B0");
  EXPECT_EQ(make_schedule("checkpoints:1", 2).to_text(),
            "I0 I1 K1 X2 B1 K0 X1 B0");
  EXPECT_EQ(make_schedule("revolve:1", 3).to_text(),
            "I0 D1 K2 B2 I0 K1 X2 B1 K0 X1 B0");
}

TEST(Strategy, SegmentsAreRecomputedAtMostOnce) {
  for (int n = 1; n <= 40; ++n) {
    std::vector<std::string> texts = {"all", "sqrt"};
    for (int k = 1; k <= n; ++k) texts.push_back("every:" + std::to_string(k));
    for (int k = 0; k < n; ++k) {
      texts.push_back("checkpoints:" + std::to_string(k));
    }
    for (const auto& text : texts) {
      const auto schedule = make_schedule(text, n);  // valid, or it throws
      for (int i = 0; i < n; ++i) EXPECT_LE(schedule.runs(i), 2) << text;
    }
  }
}

TEST(Strategy, CheckpointsKeepsExactlyKOutputs) {
  const auto chain_costs =
      ChainCosts::simple(1, std::vector<StageCosts>(26, StageCosts::simple(1)));
  for (int k : {0, 2, 4, 8, 16, 25}) {
    const auto schedule = make_schedule("checkpoints:" + std::to_string(k), 26);
    const auto result = simulate(schedule, chain_costs);
    EXPECT_EQ(result.kept_after_forward_bytes, k + 1);
    EXPECT_EQ(result.total_runs, 52);
  }
}

/// Returns the minimum number of runs to reverse n stages with `slots` kept
/// inputs, by trying every split. Independent of the tables under test.
int64_t brute_force(int n, int slots) {
  static std::map<std::pair<int, int>, int64_t> memo;
  if (n == 0) return 0;
  if (n == 1) return 1;
  const auto key = std::make_pair(n, slots);
  if (const auto found = memo.find(key); found != memo.end()) {
    return found->second;
  }
  // Without a further slot: run from the start to the last stage, then reverse
  // the rest.
  int64_t best = n + brute_force(n - 1, slots);
  if (slots > 1) {
    for (int j = 1; j < n; ++j) {
      best = std::min(
          best, j + brute_force(n - j, slots - 1) + brute_force(j, slots));
    }
  }
  return memo[key] = best;
}

/// Griewank and Walther 2000: with s slots and at most r repetitions, chains of
/// up to C(s + r, s) stages; runs = r n - C(s + r, s + 1) + n.
int64_t closed_form(int64_t n, int64_t s) {
  const auto choose = [](int64_t a, int64_t b) {
    double value = 1;
    for (int64_t i = 1; i <= b; ++i)
      value = value * double(a - b + i) / double(i);
    return std::llround(value);
  };
  int64_t r = 0;
  while (choose(s + r, s) < n) ++r;
  return r * n - choose(s + r, s + 1) + n;
}

TEST(Strategy, RevolveIsOptimal) {
  for (int n = 1; n <= 60; ++n) {
    for (int s = 1; s <= 9; ++s) {
      EXPECT_EQ(make_schedule("revolve:" + std::to_string(s), n).total_runs(),
                brute_force(n, s))
          << n << " " << s;
    }
  }
  for (int n : {100, 333, 1000}) {
    for (int s : {1, 2, 3, 6, 10, 30}) {
      EXPECT_EQ(make_schedule("revolve:" + std::to_string(s), n).total_runs(),
                closed_form(n, s))
          << n << " " << s;
    }
  }
}

TEST(Strategy, RevolveHoldsNoMoreThanItsSlots) {
  for (int n : {1, 2, 7, 30, 100}) {
    for (int s : {1, 2, 3, 6}) {
      const auto schedule = make_schedule("revolve:" + std::to_string(s), n);
      // Boundaries have 1 byte and nothing is saved, so that memory counts
      // boundaries.
      StageCosts stage = StageCosts::simple(1);
      stage.saved_inputs.clear();
      stage.saved_outputs.clear();
      const auto result = simulate(
          schedule,
          ChainCosts::simple(1, std::vector<StageCosts>(size_t(n), stage)));
      // In addition to the slots: the input and the output of the running
      // stage.
      EXPECT_LE(result.kept_peak_bytes, std::min(s, n) + 2) << n << " " << s;
    }
  }
}

TEST(Strategy, CheckpointsKeepsTheSmallestOutputNearby) {
  // Returns the first stages of the segments that a schedule recomputes.
  const auto kept = [](const Schedule& schedule) {
    std::vector<int> starts;
    for (size_t i = 0; i < schedule.forward_ops(); ++i) {
      const Op& op = schedule.ops()[i];
      if (op.kind == OpKind::kForwardKeepInput) starts.push_back(op.stage);
    }
    return starts;
  };
  const Strategy two{StrategyKind::kCheckpoints, 2};
  // Evenly spread: the inputs of stages 3 and 6. The outputs of 1 and 6 are
  // smaller.
  const std::vector<int64_t> bytes = {9, 4, 8, 8, 8, 8, 3, 7, 1};
  EXPECT_EQ(kept(make_schedule(two, 9)), (std::vector<int>{0, 3, 6}));
  EXPECT_EQ(kept(make_schedule(two, 9, bytes)), (std::vector<int>{0, 2, 7}));
  // Equal sizes are spread evenly.
  EXPECT_EQ(kept(make_schedule(two, 9, std::vector<int64_t>(9, 5))),
            (std::vector<int>{0, 3, 6}));
  // As many checkpoints as there are boundaries, whatever the sizes.
  for (int stages = 1; stages <= 12; ++stages) {
    for (int k = 0; k < stages; ++k) {
      std::vector<int64_t> sizes;
      for (int i = 0; i < stages; ++i) sizes.push_back((i * 7 + k * 5) % 11);
      const auto starts =
          kept(make_schedule({StrategyKind::kCheckpoints, k}, stages, sizes));
      EXPECT_EQ(starts.size(), static_cast<size_t>(k) + 1)
          << stages << " " << k;
    }
  }
  EXPECT_THROW(make_schedule(two, 9, {1, 2}), c10::Error);
}

}  // namespace
}  // namespace reprise
