#include "distributed/reducer.h"

#include "ranks.h"

namespace reprise::testing {
namespace {

using Parameter = GradientReducer::Parameter;

/// Parameters of three stages, with sizes that fill 64-byte buckets differently.
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

/// The gradient of parameter p on rank r.
torch::Tensor gradient(const torch::Tensor& parameter, int r, int p) {
  return torch::cos(parameter.detach() + 10 * r + p);
}

void set_gradients(const std::vector<Parameter>& list, int r) {
  for (size_t p = 0; p < list.size(); ++p) {
    torch::Tensor tensor = list[p].tensor;
    tensor.mutable_grad() = gradient(tensor, r, static_cast<int>(p));
  }
}

/// The sum of the gradients of parameter p over `ranks` ranks.
torch::Tensor expected(const torch::Tensor& parameter, int ranks, size_t p) {
  torch::Tensor sum = gradient(parameter, 0, static_cast<int>(p));
  for (int r = 1; r < ranks; ++r) {
    sum = sum + gradient(parameter, r, static_cast<int>(p));
  }
  return sum;
}

TEST(Reducer, StartsABucketWhenItsStagesAreDone) {
  expect_all_well(in_ranks({.ranks = 2}, [] {
    const auto group = RankGroup::join(group_options());
    const auto list = parameters();
    GradientReducer reducer(group, list, {.bucket_bytes = 64});
    // Buckets: last.*; middle.weight, which fills one; first.*.
    ASSERT_EQ(reducer.buckets(), 3);
    EXPECT_EQ(reducer.cuts(), (std::vector<int>{2, 1}));
    set_gradients(list, group->rank());
    reducer.final_from(2);
    EXPECT_EQ(reducer.started(), 1);
    EXPECT_EQ(reducer.counters().calls, 1);
    // The gradients of a started bucket are released.
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

TEST(Reducer, CountsAMissingGradientAsZero) {
  expect_all_well(in_ranks({.ranks = 3}, [] {
    const auto group = RankGroup::join(group_options());
    const auto list = parameters();
    GradientReducer reducer(group, list, {.bucket_bytes = 64});
    set_gradients(list, group->rank());
    // No rank has the first gradient, one rank has the second, and rank 2 has none.
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

TEST(Reducer, RoundsToBf16OncePerDirection) {
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
    // Buckets of 8, 25 and 15 values, padded to 9, 27 and 15 for three ranks.
    EXPECT_EQ(reducer.counters().bytes, 2 * (9 + 27 + 15));
    group->leave();
  }));
}

TEST(Reducer, ShardsParametersAcrossRanks) {
  expect_all_well(in_ranks({.ranks = 3}, [] {
    const auto group = RankGroup::join(group_options());
    const auto list = parameters();
    GradientReducer reducer(group, list, {.bucket_bytes = 64, .shard = true});
    set_gradients(list, group->rank());
    for (const int stage : {2, 1, 0}) reducer.final_from(stage);
    reducer.finish({});
    int64_t own = 0;
    for (auto [name, shard] : reducer.shards()) {
      const torch::NoGradGuard no_grad;  // as optimizers do
      ASSERT_TRUE(shard.grad().defined()) << name;
      own += shard.numel();
      shard.sub_(shard.grad());
    }
    // A third of 48 values, plus the padding of the buckets.
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
    reducer.all_gather_parameters();
    for (size_t p = 0; p < list.size(); ++p) {
      EXPECT_TRUE(torch::allclose(list[p].tensor, after[p], 1e-6, 1e-6));
    }

    // State kept per shard, gathered into full tensors and sharded again.
    RankGroup::NamedList kept;
    for (const auto& [name, shard] : reducer.shards()) {
      kept.emplace_back("twice." + name, 2 * shard.detach());
    }
    auto full = reducer.gather_full(kept, {"twice.", "none."});
    if (group->rank() == 0) {
      ASSERT_EQ(full.size(), list.size());
      for (const auto& [name, tensor] : full) {
        for (const auto& p : list) {
          if ("twice." + p.name == name) {
            EXPECT_TRUE(tensor.equal(2 * p.tensor.detach().cpu())) << name;
          }
        }
      }
    }
    group->broadcast_named(full);
    full.emplace_back("step", torch::scalar_tensor(4));
    auto selected = reducer.select_shards(full, {"twice."});
    ASSERT_EQ(selected.size(), kept.size() + 1);
    for (const auto& [name, tensor] : kept) {
      for (const auto& [other, value] : selected) {
        if (other == name) {
          EXPECT_TRUE(value.equal(tensor.cpu())) << name;
        }
      }
    }
    group->leave();
  }));
}

TEST(Reducer, CompletesAWindowThatOneRankAbandons) {
  expect_all_well(in_ranks({.ranks = 2}, [] {
    const auto group = RankGroup::join(group_options());
    const auto list = parameters();
    for (const bool bf16 : {false, true}) {
      GradientReducer reducer(group, list, {.bucket_bytes = 64, .bf16 = bf16});
      for (int window = 0; window < 3; ++window) {
        set_gradients(list, group->rank());
        reducer.final_from(2);
        if (window == 1 && group->rank() == 1) {
          reducer.abandon_window();
          continue;
        }
        reducer.final_from(0);
        reducer.finish({});
        if (window == 1) continue;  // the sums are meaningless
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
