// The truth is the same chain with all parameters on every rank.
#include "distributed/sharded_parameters.h"

#include "ranks.h"

#include <reprise/memory/meter.h>
#include <reprise/recompute/strategy.h>

#include <torch/nn.h>

namespace reprise::testing {
namespace {

using detail::ShardedParameters;
using detail::StageParameters;
using detail::StageVisit;
using torch::Tensor;

constexpr int64_t kWidth = 24;

/// Four stages with odd shapes; the first and the last share a weight, and one is frozen.
struct SharedLayers {
  SharedLayers() : chain(make_chain()) {}

  Chain make_chain() {
    torch::manual_seed(3);
    tied = torch::nn::Linear(kWidth, kWidth);
    std::vector<Stage> stages;
    for (int i = 0; i < 4; ++i) {
      linear.emplace_back(torch::nn::LinearOptions(kWidth, kWidth));
      auto second = i == 0 || i == 3 ? tied : torch::nn::Linear(kWidth, kWidth);
      stages.push_back(
          make_stage("layer" + std::to_string(i),
                     [layer = linear.back(), second](const Tensor& x) mutable {
                       return second->forward(torch::tanh(layer->forward(x)));
                     },
                     {linear.back().ptr(), second.ptr()}));
    }
    linear[1]->weight.set_requires_grad(false);
    for (auto& layer : linear) layer->to(device());
    tied->to(device());
    Chain made(std::move(stages));
    for (Tensor p : made.parameters()) p.set_data(p.detach().to(device()));
    return made;
  }

  GradientReducer::NamedList named() const {
    GradientReducer::NamedList list;
    for (const Tensor& p : chain.parameters()) {
      list.emplace_back("p" + std::to_string(list.size()), p);
    }
    return list;
  }

  std::vector<torch::nn::Linear> linear;
  torch::nn::Linear tied{nullptr};
  Chain chain;
};

Tensor layer_input(int micro) {
  torch::manual_seed(100 + micro);
  return torch::randn({5, kWidth}).to(device());
}

struct Divided {
  explicit Divided(const std::shared_ptr<RankGroup>& group,
                   const ShardedParameters::Options& options =
                       ShardedParameters::Options{.bucket_bytes = 2048})
      : parameters(std::make_shared<ShardedParameters>(
            group, layers.chain, layers.named(), device(), options)),
        chain(StageParameters::wrapped(layers.chain, parameters)) {}
  SharedLayers layers;
  std::shared_ptr<ShardedParameters> parameters;
  Chain chain;
};

TEST(ShardedParameters, DoesNotChangeGradients) {
  for (const int ranks : {1, 3}) {
    expect_all_well(in_ranks(ranks_in("", ranks), [] {
      const auto group = RankGroup::join(group_options());
      for (const char* strategy : {"none", "all", "sqrt", "revolve:1"}) {
        SCOPED_TRACE(strategy);
        const Schedule schedule = make_schedule(strategy, 4);
        const SharedLayers plain;
        Execution reference(plain.chain, schedule);
        Divided divided(group);
        ASSERT_EQ(divided.layers.linear[0]->weight.storage().data(), nullptr);
        Execution execution(divided.chain, schedule,
                            {.memory = divided.parameters.get(),
                             .cuts = divided.parameters->cuts()});
        for (int micro = 0; micro < 3; ++micro) {
          const Tensors expected = reference.forward({layer_input(micro)});
          reference.backward({torch::ones_like(expected[0])});
          divided.parameters->begin(detail::stage_visits(schedule));
          const Tensors got = execution.forward({layer_input(micro)});
          execution.backward({torch::ones_like(got[0])});
          divided.parameters->end();
          EXPECT_TRUE(same(got[0], expected[0]));
        }
        const auto parameters = divided.layers.chain.parameters();
        for (size_t i = 0; i < parameters.size(); ++i) {
          const Tensor gradient = plain.chain.parameters()[i].grad();
          ASSERT_EQ(parameters[i].grad().defined(), gradient.defined());
          if (gradient.defined()) {
            EXPECT_TRUE(same(parameters[i].grad(), gradient)) << i;
          }
        }
      }
      group->leave();
    }));
  }
}

/// One layer, whose weight need not be a multiple of anything.
struct OneLayer {
  explicit OneLayer(int64_t width)
      : linear(torch::nn::LinearOptions(width, width + 1)),
        chain({make_stage("linear",
                          [layer = linear](const Tensor& x) mutable {
                            return layer->forward(x);
                          },
                          {linear.ptr()})}) {
    linear->to(device());
  }
  torch::nn::Linear linear;
  Chain chain;
};

TEST(ShardedParameters, GathersHalfOfTheBytesInHalfPrecision) {
  for (const int ranks : {1, 3}) {
    expect_all_well(in_ranks(ranks_in("", ranks), [] {
      const auto group = RankGroup::join(group_options());
      const torch::NoGradGuard no_grad;
      for (const int64_t width : {3, 127, 260}) {
        for (const auto half : {torch::kBFloat16, torch::kHalf}) {
          torch::manual_seed(3);  // equal on all ranks
          OneLayer layer(width);
          const Tensor weight = layer.linear->weight.detach().clone();
          const Tensor bias = layer.linear->bias.detach().clone();
          auto parameters = std::make_shared<ShardedParameters>(
              group, layer.chain,
              ShardedParameters::NamedList{{"weight", layer.linear->weight},
                                           {"bias", layer.linear->bias}},
              device(),
              ShardedParameters::Options{.halved = {layer.linear->weight},
                                         .half = half});
          const int64_t before = live_bytes(device());
          parameters->bring(0);
          EXPECT_TRUE(
              same(layer.linear->weight, weight.to(half).to(torch::kFloat)));
          EXPECT_TRUE(same(layer.linear->bias, bias));
          EXPECT_LE(live_bytes(device()) - before,
                    parameters->stage_bytes()[0] + 1024);
          const auto bytes =
              static_cast<int64_t>(weight.nbytes() / 2 + bias.nbytes());
          EXPECT_GE(parameters->counters().bytes, bytes);
          EXPECT_LE(parameters->counters().bytes, bytes + 16);
          EXPECT_EQ(parameters->wire_bytes(), parameters->counters().bytes);
          // The pieces keep all bits.
          for (const auto& [name, tensor] : parameters->gather_all()) {
            EXPECT_TRUE(same(tensor, (name == "bias" ? bias : weight).cpu()));
          }
        }
      }
      group->leave();
    }));
  }
}

TEST(ShardedParameters, EachRankHasItsShare) {
  expect_all_well(in_ranks({.ranks = 3}, [] {
    const auto group = RankGroup::join(group_options());
    const SharedLayers whole;
    int64_t all = 0;
    for (const Tensor& p : whole.chain.parameters()) {
      all += static_cast<int64_t>(p.nbytes());
    }
    const Divided divided(group);
    const int64_t own = divided.parameters->own_bytes();
    EXPECT_GE(own, all / 3);
    // Parameters begin at multiples of 128 bytes.
    EXPECT_LE(own, all / 3 + 12 * 128);
    // One stage and the next are there at a time.
    const int64_t before = live_bytes(device());
    const torch::NoGradGuard no_grad;
    divided.chain.forward(Tensors{layer_input(0)}, make_schedule("none", 4));
    const auto& stages = divided.parameters->stage_bytes();
    const int64_t largest = *std::max_element(stages.begin(), stages.end());
    EXPECT_LE(live_bytes(device()) - before, 2 * largest + 4096);
    divided.parameters->abandon();
    EXPECT_LE(live_bytes(device()) - before, 4096);
    group->leave();
  }));
}

TEST(ShardedParameters, GathersAndLoadsWholeParameters) {
  expect_all_well(in_ranks({.ranks = 3}, [] {
    const auto group = RankGroup::join(group_options());
    const SharedLayers whole;
    const Divided divided(group);
    const auto all = divided.parameters->gather_all();
    EXPECT_EQ(all.empty(), group->rank() != 0);
    for (const auto& [name, tensor] : all) {
      const size_t index = std::stoul(name.substr(1));
      EXPECT_TRUE(same(tensor, whole.chain.parameters()[index].cpu())) << name;
    }
    auto list = whole.named();
    const torch::NoGradGuard no_grad;
    for (auto& item : list) item.second = item.second.detach() * 2;
    divided.parameters->load(list);
    const ShardedParameters::Readable readable(divided.parameters.get());
    if (group->rank() == 0) {
      const auto parameters = divided.layers.chain.parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_TRUE(same(parameters[i], list[i].second.cpu())) << i;
      }
    }
    group->leave();
  }));
}

// Rank 1 stops computing at every possible visit and keeps gathering.
TEST(ShardedParameters, ARankThatFailedTakesPart) {
  expect_all_well(in_ranks({.ranks = 2}, [] {
    const auto group = RankGroup::join(group_options());
    const Schedule schedule = make_schedule("all", 4);
    const auto visits = detail::stage_visits(schedule);
    Divided divided(group);
    const SharedLayers plain;
    Execution reference(plain.chain, schedule);
    for (size_t stop = 0; stop <= visits.size(); ++stop) {
      class Failing final : public ExecutionObserver {
       public:
        Failing(bool fails, size_t after) : fails_(fails), left_(after) {}
        void before(const Op& op) override {
          if (op.kind == OpKind::kDiscard || op.stage == last_) return;
          last_ = op.stage;
          if (fails_ && left_-- == 0) throw std::runtime_error("stop");
        }

       private:
        bool fails_;
        size_t left_;
        int last_ = -1;
      };
      Failing failing(group->rank() == 1, stop);
      Execution execution(divided.chain, schedule,
                          {.observer = &failing,
                           .memory = divided.parameters.get(),
                           .cuts = divided.parameters->cuts()});
      divided.parameters->begin(visits);
      std::vector<StageVisit> dry;
      try {
        const Tensors got = execution.forward({layer_input(0)});
        execution.backward({torch::ones_like(got[0])});
        divided.parameters->end();
        const Tensors expected = reference.forward({layer_input(0)});
        EXPECT_TRUE(same(got[0], expected[0])) << stop;
      } catch (const std::runtime_error&) {
        divided.parameters->abandon();
        divided.parameters->finish_without_computing(
            [&](const StageVisit& visit) { dry.push_back(visit); });
        EXPECT_EQ(dry.back(), visits.back());
      }
    }
    // Both ranks are in step.
    const auto all = divided.parameters->gather_all();
    EXPECT_EQ(all.empty(), group->rank() != 0);
    group->leave();
  }));
}

}  // namespace
}  // namespace reprise::testing
