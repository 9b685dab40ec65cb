#include "host_store.h"
#include "support.h"

#include <reprise/memory/kept.h>
#include <reprise/memory/meter.h>
#include <reprise/recompute/keep.h>
#include <reprise/recompute/stage_costs.h>
#include <reprise/recompute/strategy.h>

#include <torch/autograd.h>
#include <torch/nn/modules/dropout.h>

#include <stdexcept>
#include <string>
#include <tuple>

namespace reprise {
namespace {

using testing::device;
using testing::error_of;
using testing::on_device;
using testing::same;
using testing::take_gradients;
using torch::Tensor;
namespace nn = torch::nn;

constexpr int64_t kBytes = 1 << 20;

Tensor keep_input() {
  return torch::rand({kBytes / 4}, on_device()).requires_grad_();
}

Tensor gradient(const Tensor& y, const Tensor& x) {
  return torch::autograd::grad({y.sum()}, {x})[0];
}

/// sin(exp(x)) · 3 |> keep: square(·) |> exp, with call counters.
struct CountedCall {
  int* before;
  int* kept;
  int* after;
  Tensor operator()(const Tensor& x) const {
    ++*before;
    const Tensor a = x.exp().sin() * 3;
    const Tensor b = keep(
        "square",
        [this](const Tensor& t) {
          ++*kept;
          return t.square();
        },
        a);
    const Tensor c = b.sin();
    ++*after;
    return c.exp();
  }
};

TEST(Keep, TheRecomputationDoesNotRunIt) {
  const auto x = keep_input();
  int before = 0, kept = 0, after = 0;
  const CountedCall function{&before, &kept, &after};
  const auto expected = gradient(function(x), x);
  EXPECT_EQ(before + kept + after, 3) << "a plain call outside of checkpoint()";

  before = kept = after = 0;
  const auto y = checkpoint(function, x);
  EXPECT_EQ(kept, 1);
  EXPECT_TRUE(same(gradient(y, x), expected));
  EXPECT_EQ(before, 2);
  EXPECT_EQ(kept, 1);
  EXPECT_EQ(after, 2);

  before = kept = after = 0;
  const auto z =
      checkpoint_with({.keep_names = std::vector<std::string>{}}, function, x);
  EXPECT_TRUE(same(gradient(z, x), expected));
  EXPECT_EQ(kept, 2);
  EXPECT_EQ(after, 2);
}

TEST(Keep, KeepsOutputsAndWhatIsNotAnInput) {
  const auto x = keep_input();
  const auto kept_by = [&](auto function) {
    const KeptMeter meter;
    Tensor y;
    {
      const KeptMeter::Scope scope(meter, 0);
      y = checkpoint(
          [&](const Tensor& t) {
            return keep("f", function, t * 2).sin().sum();
          },
          x);
    }
    const int64_t bytes = meter.live_bytes();
    y.backward();
    EXPECT_EQ(meter.live_bytes(), 0);
    return bytes;
  };
  // Besides x: the output. sin saves its input, exp its output.
  EXPECT_EQ(kept_by([](const Tensor& t) { return t.sin(); }), 2 * kBytes);
  EXPECT_EQ(kept_by([](const Tensor& t) { return t.exp(); }), 2 * kBytes);
  // Also the result of exp, which sin saves.
  EXPECT_EQ(kept_by([](const Tensor& t) { return t.exp().sin(); }), 3 * kBytes);
  // A view of the input is not kept.
  EXPECT_EQ(kept_by([](const Tensor& t) {
              return t.view({16, -1}).sin();
            }),
            2 * kBytes);
}

TEST(Keep, HoldsNothingAfterTheBackward) {
  const auto x = keep_input();
  const int64_t before = live_bytes(device());
  int calls = 0;
  {
    const auto y = checkpoint(CountedCall{&calls, &calls, &calls}, x).sum();
    // The output of the kept call.
    EXPECT_NEAR(static_cast<double>(live_bytes(device()) - before), kBytes,
                4096);
    y.backward();
  }
  EXPECT_EQ(live_bytes(device()) - before, kBytes) << "the gradient of x";
  x.mutable_grad().reset();
  { const auto unused = checkpoint(CountedCall{&calls, &calls, &calls}, x); }
  EXPECT_EQ(live_bytes(device()), before);
}

/// Attention with dropout between two linear layers.
struct AttendImpl : nn::Module {
  AttendImpl() {
    register_module("qkv", qkv);
    register_module("project", project);
    register_module("dropout", dropout);
    to(device());
  }
  Tensor forward(const Tensor& x) {
    ++runs;
    const Tensor joined = keep("qkv", qkv, torch::tanh(x));
    const auto attended = keep(
        "attention",
        [this](const Tensor& t) {
          ++attention_runs;
          const auto parts = t.chunk(3, -1);
          const auto weights = parts[0].matmul(parts[1].transpose(-1, -2));
          return std::make_tuple(dropout(weights.softmax(-1)).matmul(parts[2]),
                                 parts[0].square());
        },
        joined);
    const Tensor y = dropout(std::get<0>(attended) + std::get<1>(attended));
    return x + project(dropout(torch::gelu(y)));
  }
  nn::Linear qkv{8, 24};
  nn::Linear project{8, 8};
  nn::Dropout dropout{0.4};
  int runs = 0;
  int attention_runs = 0;
};
TORCH_MODULE(Attend);

TEST(Keep, SupportsRandomNumbersViewsAndTuples) {
  Attend net;
  const auto x = torch::randn({3, 5, 8}, on_device()).requires_grad_();
  const auto run = [&](auto&& call) {
    torch::manual_seed(9);
    const Tensor y = call();
    y.square().sum().backward();
    auto results = take_gradients(net->parameters());
    results.push_back(x.grad().clone());
    x.mutable_grad().reset();
    results.push_back(y.detach());
    results.push_back(torch::rand({4}, on_device()));  // position of the RNG
    return results;
  };
  const auto expect = [](const Tensors& got, const Tensors& expected) {
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(same(got[i], expected[i])) << i;
    }
  };
  const auto expected = run([&] { return net->forward(x); });
  net->runs = net->attention_runs = 0;
  expect(run([&] { return checkpoint(net, x); }), expected);
  EXPECT_EQ(net->runs, 2);
  EXPECT_EQ(net->attention_runs, 1);
  expect(run([&] {
           return checkpoint_with(
               {.keep_names = std::vector<std::string>{"qkv"}}, net, x);
         }),
         expected);
  EXPECT_EQ(net->attention_runs, 3);
  // Nested: the outer checkpoint drops what the inner one keeps.
  const auto nested = [&](const Tensor& t) { return checkpoint(net, t); };
  expect(run([&] { return checkpoint(nested, x); }), expected);
  const auto outer = [&](const Tensor& t) {
    return keep("outer", nested, t) * 1;
  };
  expect(run([&] { return checkpoint(outer, x); }), expected);
}

TEST(Keep, AnOuterCheckpointDropsWhatIsKept) {
  const auto x = keep_input();
  int calls = 0;
  const CountedCall function{&calls, &calls, &calls};
  const int64_t before = live_bytes(device());
  const auto y = checkpoint(
      [&](const Tensor& t) { return checkpoint(function, t).sum(); }, x);
  EXPECT_LT(live_bytes(device()) - before, 20000);
  const auto expected = gradient(function(x), x);
  EXPECT_TRUE(same(gradient(y, x), expected));
}

TEST(Keep, SupportsRetainedGraphsAndSecondDerivatives) {
  const auto x = torch::rand({6}, on_device(torch::kDouble)).requires_grad_();
  const auto function = [](const Tensor& t) {
    const Tensor a = t.sin() * t;
    return (keep(
                "k", [](const Tensor& u) { return (u.exp() * u).cos(); }, a) *
            t.exp())
        .sum();
  };
  const auto y = checkpoint(function, x);
  const auto first = torch::autograd::grad({y}, {x}, {}, true)[0];
  EXPECT_TRUE(same(torch::autograd::grad({y}, {x}, {}, true)[0], first));
  EXPECT_TRUE(same(gradient(function(x), x), first));
  const auto second = [&](const Tensor& value) {
    const auto g =
        torch::autograd::grad({value}, {x}, {}, true, /*create_graph=*/true)[0];
    return torch::autograd::grad({g.square().sum()}, {x})[0];
  };
  EXPECT_LT(testing::relative_error(second(function(x)),
                                    second(checkpoint(function, x))),
            1e-14);
}

TEST(Keep, SupportsListsAndUndefinedOutputs) {
  const auto x = keep_input();
  const auto y = checkpoint(
      [](const Tensor& t) {
        const auto made =
            keep_list("list",
                      [](const Tensors& in) {
                        EXPECT_FALSE(in[1].defined());
                        return Tensors{in[0].exp(), Tensor(), in[0].gt(0.5)};
                      },
                      {t, Tensor()});
        EXPECT_FALSE(made[1].defined());
        EXPECT_FALSE(made[2].requires_grad());
        return made[0].masked_fill(made[2], 0).sin();
      },
      x);
  EXPECT_TRUE(same(gradient(y, x),
                   gradient(x.exp().masked_fill(x.gt(0.5), 0).sin(), x)));
}

TEST(Keep, InsideOfAnotherIsAPlainCall) {
  const auto x = keep_input();
  int inner = 0, outer = 0;
  const auto y = checkpoint(
      [&](const Tensor& t) {
        return keep(
                   "outer",
                   [&](const Tensor& u) {
                     ++outer;
                     return keep(
                         "inner",
                         [&](const Tensor& v) {
                           ++inner;
                           return v.exp();
                         },
                         u.sin());
                   },
                   t)
            .cos();
      },
      x);
  EXPECT_TRUE(same(gradient(y, x), gradient(x.sin().exp().cos(), x)));
  EXPECT_EQ(inner, 1);
  EXPECT_EQ(outer, 1);
}

TEST(Keep, WorksInStagesOfAnySchedule) {
  Attend net;
  const Stage stage = make_stage(
      "attend", [net](const Tensor& x) mutable { return checkpoint(net, x); },
      {net.ptr()});
  const Chain chain({stage, stage, stage});
  const auto x = torch::randn({3, 5, 8}, on_device());
  const auto run = [&](const char* strategy) {
    torch::manual_seed(2);
    chain.forward(x, make_schedule(strategy, 3)).sum().backward();
    return take_gradients(chain.parameters());
  };
  torch::manual_seed(2);
  net->forward(net->forward(net->forward(x))).sum().backward();
  const auto expected = take_gradients(chain.parameters());
  for (const char* strategy : {"none", "all", "checkpoints:0"}) {
    const auto got = run(strategy);
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(same(got[i], expected[i])) << strategy << ' ' << i;
    }
  }
}

TEST(Keep, RejectsWrongUse) {
  const auto x = torch::rand({4, 4}, on_device()).requires_grad_();
  const int64_t before = live_bytes(device());
  const auto expect = [&](const std::string& part, auto function,
                          CheckpointOptions options = {}) {
    const auto text = error_of(
        [&] { checkpoint_with(options, function, x).sum().backward(); });
    EXPECT_NE(text.find(part), std::string::npos) << text;
    EXPECT_FALSE(is_recomputing());
    EXPECT_EQ(live_bytes(device()), before);
  };
  const auto exp = [](const Tensor& t) { return t.exp(); };
  expect("[keep] the value 'y' was modified in place after it was kept",
         [&](const Tensor& t) {
           auto y = keep(
               "y", [](const Tensor& u) { return u.sin(); }, t * 2);
           y.add_(1);
           return y.exp();
         });
  expect("[keep] input 0 of 'y' was modified in place", [&](const Tensor& t) {
    return keep(
        "y", [](Tensor u) { return u.add_(1).exp(); }, t * 2);
  });
  expect("call 0 of keep() was 'a', is now 'b'", [&](const Tensor& t) {
    return keep(is_recomputing() ? "b" : "a", exp, t.sin()).sin();
  });
  expect("call 1 of keep() was '', is now 'a'", [&](const Tensor& t) {
    Tensor y = keep("a", exp, t.sin());
    if (is_recomputing()) y = keep("a", exp, y);
    return y.sin();
  });
  expect("in keep_names, got 'qvk'; did you mean qkv?",
         [&](const Tensor& t) { return keep("qkv", exp, t); },
         {.keep_names = std::vector<std::string>{"qvk"}});
  EXPECT_NE(error_of([&] {
              keep_list("none", nullptr, {x});
            }).find("[keep] expected a function for 'none', got none"),
            std::string::npos);
  EXPECT_THROW(checkpoint(
                   [](const Tensor& t) {
                     return keep(
                         "throws",
                         [](const Tensor&) -> Tensor {
                           throw std::out_of_range("mine");
                         },
                         t.exp());
                   },
                   x),
               std::out_of_range);
  EXPECT_EQ(live_bytes(device()), before);
}

TEST(Keep, NamedSavesAreVariants) {
  Attend net;
  const Stage plain = make_stage(
      "attend", [net](const Tensor& x) mutable { return net->forward(x); },
      {net.ptr()});
  const Stage stage = with_named_saves(plain);
  ASSERT_EQ(stage.variants().size(), 2u);
  EXPECT_EQ(stage.variants()[0].name, kRecomputed);
  EXPECT_EQ(stage.variants()[1].name, kRecomputedButNamed);
  const Chain chain({stage});
  const auto x = torch::randn({3, 64, 8}, on_device());
  const auto run = [&](int variant) {
    torch::manual_seed(2);
    const Schedule schedule(
        "variant", 1,
        {{OpKind::kForwardKeep, 0, variant}, {OpKind::kBackward, 0}});
    chain.forward(x, schedule).sum().backward();
    return take_gradients(chain.parameters());
  };
  const auto expected = run(0);
  for (const int variant : {1, 2}) {
    net->attention_runs = 0;
    const auto got = run(variant);
    EXPECT_EQ(net->attention_runs, variant == 1 ? 2 : 1);
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(same(got[i], expected[i])) << variant << ' ' << i;
    }
  }
  const ChainCosts costs = measure_stage_costs(chain, {x});
  const auto& variants = costs.stages[0].variants;
  EXPECT_EQ(variants[0].saved_bytes, 0);
  EXPECT_GT(variants[1].saved_bytes, 0);
  EXPECT_LT(variants[1].saved_bytes, costs.stages[0].saved_bytes);
}

/// As CountedCall, with the value of square() in host memory.
Tensor offloading(const Tensor& x) {
  const Tensor a = x.exp().sin() * 3;
  const Tensor b = offload(
      "square", [](const Tensor& t) { return t.square(); }, a);
  return b.sin().exp();
}

TEST(Keep, OffloadMovesValuesToTheHost) {
  const auto store = std::make_shared<testing::CountingStore>();
  const auto x = keep_input();
  const Tensor expected = gradient(offloading(x), x);
  int before = 0, kept = 0, after = 0;
  const CountedCall counted{&before, &kept, &after};
  const int64_t base = live_bytes(device());
  {
    const Tensor y = checkpoint_with({.offload_store = store}, offloading, x);
    EXPECT_EQ(store->counts->sent, 1);
    EXPECT_EQ(store->counts->bytes, kBytes);
    // On the device only the result.
    EXPECT_LT(live_bytes(device()) - base, kBytes * 3 / 2);
    EXPECT_TRUE(same(gradient(y, x), expected));
    EXPECT_EQ(store->counts->fetched, 1);
  }
  EXPECT_EQ(store->counts->alive, 0);
  // keep() has its values on the device.
  gradient(checkpoint_with({.offload_store = store}, counted, x), x);
  EXPECT_EQ(kept, 1);
  EXPECT_EQ(store->counts->sent, 1);
}

TEST(Keep, OffloadKeepsWithoutAStoreAndWhatIsSmall) {
  const auto x = keep_input();
  const Tensor expected = gradient(offloading(x), x);
  int64_t base = live_bytes(device());
  {
    const Tensor y = checkpoint(offloading, x);
    EXPECT_GE(live_bytes(device()) - base, 2 * kBytes);
    EXPECT_TRUE(same(gradient(y, x), expected));
  }
  const auto store = std::make_shared<testing::CountingStore>();
  CheckpointOptions options;
  options.offload_store = store;
  options.offload.min_bytes = 2 * kBytes;
  EXPECT_TRUE(
      same(gradient(checkpoint_with(options, offloading, x), x), expected));
  EXPECT_EQ(store->counts->sent, 0);
  // A store without room.
  const auto full = std::make_shared<testing::CountingStore>(kBytes / 2);
  EXPECT_TRUE(
      same(gradient(checkpoint_with({.offload_store = full}, offloading, x), x),
           expected));
  // An outer checkpoint drops the value.
  const auto nested = [&store](const Tensor& t) {
    return checkpoint_with({.offload_store = store}, offloading, t);
  };
  EXPECT_TRUE(same(gradient(checkpoint(nested, x), x), expected));
  EXPECT_EQ(store->counts->alive, 0);
}

TEST(Keep, OffloadIsAVariantWithHostBytes) {
  const auto store = std::make_shared<testing::CountingStore>();
  const Stage plain = make_stage("s", offloading);
  const Stage stage = with_named_saves(plain, store);
  ASSERT_EQ(stage.variants().size(), 3u);
  EXPECT_EQ(stage.variants()[2].name, kNamedOnHost);
  const Chain chain(
      {stage, make_stage("sum", [](const Tensor& t) { return t.sum(); })});
  const auto x = keep_input();
  const StageCosts costs = measure_stage_costs(chain, {x}).stages[0];
  EXPECT_EQ(costs.variants[1].host_bytes, 0);
  EXPECT_GE(costs.variants[1].saved_bytes, kBytes);
  EXPECT_EQ(costs.variants[2].host_bytes, kBytes);
  EXPECT_LT(costs.variants[2].saved_bytes, kBytes);
  const auto run = [&](const std::string& schedule) {
    Execution execution(chain, Schedule::parse("given", 2, schedule));
    const Tensors out = execution.forward({x});
    return execution.backward({torch::ones_like(out[0])})[0];
  };
  const Tensor expected = run("K0 K1 B1 B0");
  EXPECT_TRUE(same(run("K0.3 K1 B1 B0"), expected));
  EXPECT_TRUE(same(run("K0.3 K1 F0 B1 B0"), expected));
  EXPECT_EQ(store->counts->alive, 0);
}

}  // namespace
}  // namespace reprise
