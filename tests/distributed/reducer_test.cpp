#include "ranks.h"

#include <reprise/distributed/reducer.h>

namespace reprise::testing {
namespace {

using Parameter = GradientReducer::Parameter;

/// Of three stages; sizes that fill buckets of 64 bytes in different ways.
std::vector<Parameter> parameters() {
  std::vector<Parameter> list;
  const auto add = [&](const char* name, std::vector<int64_t> sizes,
                       int stage) {
    list.push_back({name,
                    torch::arange(c10::multiply_integers(sizes), on_device())
                        .view(sizes)
                        .requires_grad_(true),
                    stage});
  };
  add("first.weight", {3, 4}, 0);
  add("first.bias", {3}, 0);
  add("middle.weight", {5, 5}, 1);
  add("last.weight", {7}, 2);
  add("last.bias", {1}, 2);
  return list;
}

/// What rank r's gradient of parameter p is.
torch::Tensor gradient(const torch::Tensor& parameter, int r, int p) {
  return torch::cos(parameter.detach() + 10 * r + p);
}

void set_gradients(const std::vector<Parameter>& list, int r) {
  for (size_t p = 0; p < list.size(); ++p) {
    torch::Tensor tensor = list[p].tensor;
    tensor.mutable_grad() = gradient(tensor, r, static_cast<int>(p));
  }
}

torch::Tensor expected(const torch::Tensor& parameter, int ranks, size_t p) {
  torch::Tensor sum = gradient(parameter, 0, static_cast<int>(p));
  for (int r = 1; r < ranks; ++r) {
    sum = sum + gradient(parameter, r, static_cast<int>(p));
  }
  return sum;
}

TEST(Reducer, StartsBucketsAsTheirStagesEnd) {
  expect_all_well(in_ranks({.ranks = 2}, [] {
    const auto group = RankGroup::join(group_options());
    const auto list = parameters();
    GradientReducer reducer(group, list, {.bucket_bytes = 64});
    // last.weight and last.bias; middle.weight, too large to share one; first.*.
    ASSERT_EQ(reducer.buckets(), 3);
    EXPECT_EQ(reducer.cuts(), (std::vector<int>{2, 1}));
    set_gradients(list, group->rank());
    reducer.final_from(2);
    EXPECT_EQ(reducer.started(), 1);
    EXPECT_EQ(reducer.counters().calls, 1);
    // Changes to what is on its way would show.
    EXPECT_FALSE(list[3].tensor.grad().defined());
    EXPECT_TRUE(list[2].tensor.grad().defined());
    reducer.final_from(1);
    EXPECT_EQ(reducer.started(), 2);
    reducer.final_from(0);
    EXPECT_EQ(reducer.started(), 3);
    const auto loss =
        reducer.finish(torch::scalar_tensor(group->rank() + 1.0, on_device()));
    EXPECT_EQ(loss.item<double>(), 3);
    for (size_t p = 0; p < list.size(); ++p) {
      EXPECT_TRUE(torch::allclose(list[p].tensor.grad(),
                                  expected(list[p].tensor, 2, p), 1e-6, 1e-7))
          << list[p].name;
    }
    EXPECT_EQ(reducer.counters().windows, 1);
    EXPECT_EQ(reducer.counters().calls, 3);
    EXPECT_EQ(reducer.counters().bytes, 4 * (12 + 3 + 25 + 7 + 1));
    group->leave();
  }));
}

TEST(Reducer, CountsWhatARankDoesNotHave) {
  expect_all_well(in_ranks({.ranks = 3}, [] {
    const auto group = RankGroup::join(group_options());
    const auto list = parameters();
    GradientReducer reducer(group, list, {.bucket_bytes = 64});
    set_gradients(list, group->rank());
    // Nobody has the first, one rank the second, and rank 2 has nothing at all.
    torch::Tensor none = list[0].tensor;
    torch::Tensor one = list[1].tensor;
    none.mutable_grad().reset();
    if (group->rank() != 1) one.mutable_grad().reset();
    if (group->rank() == 2) {
      for (torch::Tensor p : {list[2].tensor, list[3].tensor, list[4].tensor}) {
        p.mutable_grad().reset();
      }
    } else {
      for (const int stage : {2, 1, 0}) reducer.final_from(stage);
    }
    reducer.finish({});
    EXPECT_FALSE(none.grad().defined());
    EXPECT_TRUE(torch::allclose(one.grad(), gradient(one, 1, 1)));
    for (size_t p = 2; p < list.size(); ++p) {
      EXPECT_TRUE(torch::allclose(list[p].tensor.grad(),
                                  expected(list[p].tensor, 2, p), 1e-6, 1e-7));
    }
    group->leave();
  }));
}

TEST(Reducer, RoundsOnceEachWayInBf16) {
  expect_all_well(in_ranks({.ranks = 3}, [] {
    const auto group = RankGroup::join(group_options());
    const auto list = parameters();
    GradientReducer reducer(group, list, {.bucket_bytes = 64, .bf16 = true});
    set_gradients(list, group->rank());
    for (const int stage : {2, 1, 0}) reducer.final_from(stage);
    reducer.finish({});
    for (size_t p = 0; p < list.size(); ++p) {
      const auto& tensor = list[p].tensor;
      torch::Tensor sum = torch::zeros_like(tensor);
      for (int r = 0; r < 3; ++r) {
        sum += gradient(tensor, r, static_cast<int>(p))
                   .to(torch::kBFloat16)
                   .to(torch::kFloat);
      }
      const auto rounded = sum.to(torch::kBFloat16).to(torch::kFloat);
      EXPECT_TRUE(tensor.grad().equal(rounded)) << list[p].name;
    }
    // Buckets of 8, 25 and 15 values, which three can share as 9, 27 and 15.
    EXPECT_EQ(reducer.counters().bytes, 2 * (9 + 27 + 15));
    group->leave();
  }));
}

TEST(Reducer, DividesValuesAmongRanks) {
  expect_all_well(in_ranks({.ranks = 3}, [] {
    const auto group = RankGroup::join(group_options());
    const auto list = parameters();
    GradientReducer reducer(group, list, {.bucket_bytes = 64, .shard = true});
    set_gradients(list, group->rank());
    for (const int stage : {2, 1, 0}) reducer.final_from(stage);
    reducer.finish({});
    int64_t own = 0;
    for (auto [name, piece] : reducer.pieces()) {
      ASSERT_TRUE(piece.grad().defined()) << name;
      own += piece.numel();
      piece.sub_(piece.grad());
    }
    // A third of 48 values, but for what rounding buckets up makes of it.
    EXPECT_LE(own, 3 + 9 + 5);
    EXPECT_EQ(group->all_reduce_sum({double(own)}).at(0), 48);
    std::vector<torch::Tensor> after;
    for (size_t p = 0; p < list.size(); ++p) {
      const auto& tensor = list[p].tensor;
      EXPECT_FALSE(tensor.grad().defined());
      const auto before =
          torch::arange(tensor.numel(), on_device()).view(tensor.sizes());
      torch::Tensor sum = torch::zeros_like(before);
      for (int r = 0; r < 3; ++r) {
        sum += gradient(before, r, static_cast<int>(p));
      }
      after.push_back(before - sum);
    }
    reducer.share_pieces();
    for (size_t p = 0; p < list.size(); ++p) {
      EXPECT_TRUE(torch::allclose(list[p].tensor, after[p], 1e-6, 1e-6));
    }

    // What is kept by pieces, as a whole and back.
    RankGroup::NamedList kept;
    for (const auto& [name, piece] : reducer.pieces()) {
      kept.emplace_back("twice." + name, 2 * piece.detach());
    }
    auto whole = reducer.whole(kept, {"twice.", "none."});
    if (group->rank() == 0) {
      ASSERT_EQ(whole.size(), list.size());
      for (const auto& [name, tensor] : whole) {
        for (const auto& p : list) {
          if ("twice." + p.name == name) {
            EXPECT_TRUE(tensor.equal(2 * p.tensor.detach().cpu())) << name;
          }
        }
      }
    }
    group->broadcast_named(whole);
    whole.emplace_back("step", torch::scalar_tensor(4));
    auto parts = reducer.parts(whole, {"twice."});
    ASSERT_EQ(parts.size(), kept.size() + 1);
    for (const auto& [name, tensor] : kept) {
      for (const auto& [other, part] : parts) {
        if (other == name) {
          EXPECT_TRUE(part.equal(tensor.cpu())) << name;
        }
      }
    }
    group->leave();
  }));
}

TEST(Reducer, TakesPartWhereARankGivesUp) {
  expect_all_well(in_ranks({.ranks = 2}, [] {
    const auto group = RankGroup::join(group_options());
    const auto list = parameters();
    for (const bool bf16 : {false, true}) {
      GradientReducer reducer(group, list, {.bucket_bytes = 64, .bf16 = bf16});
      for (int window = 0; window < 3; ++window) {
        set_gradients(list, group->rank());
        reducer.final_from(2);
        if (window == 1 && group->rank() == 1) {
          reducer.give_up();
          continue;
        }
        reducer.final_from(0);
        reducer.finish({});
        if (window == 1) continue;  // worth nothing
        EXPECT_TRUE(torch::allclose(list[2].tensor.grad(),
                                    expected(list[2].tensor, 2, 2),
                                    bf16 ? 1e-2 : 1e-6, 1e-2));
      }
    }
    group->leave();
  }));
}

}  // namespace
}  // namespace reprise::testing
