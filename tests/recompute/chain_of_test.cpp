#include "support.h"

#include <reprise/recompute/chain_of.h>
#include <reprise/recompute/check_chain.h>
#include <reprise/recompute/strategy.h>

#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/loss.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/pooling.h>

#include <string>
#include <vector>

namespace reprise {
namespace {

using testing::device;
using testing::error_of;
using testing::on_device;
using testing::same;
using testing::take_gradients;
using torch::Tensor;
namespace nn = torch::nn;

constexpr int64_t kModelWidth = 8;
constexpr int64_t kTokens = 12;

bool mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// x + W₂ gelu(W₁ norm(x)), with dropout; one head of attention before it.
struct BlockImpl : nn::Module {
  BlockImpl() {
    register_module("norm", norm);
    register_module("qkv", qkv);
    register_module("mlp", mlp);
  }
  Tensor forward(const Tensor& x) {
    const auto parts = qkv(norm(x)).chunk(3, -1);
    const auto weights = parts[0].matmul(parts[1].transpose(-1, -2));
    const auto y = x + weights.softmax(-1).matmul(parts[2]);
    return y + mlp->forward(y);
  }
  nn::LayerNorm norm{nn::LayerNormOptions({kModelWidth})};
  nn::Linear qkv{kModelWidth, 3 * kModelWidth};
  nn::Sequential mlp{nn::Linear(kModelWidth, 16), nn::GELU(), nn::Dropout(0.3),
                     nn::Linear(16, kModelWidth)};
};
TORCH_MODULE(Block);

/// Linear layer whose weight is that of the embedding.
struct TiedHeadImpl : nn::Module {
  explicit TiedHeadImpl(nn::Embedding embed) : embed(embed) {
    register_module("embed", embed);
  }
  Tensor forward(const Tensor& x) {
    return nn::functional::linear(x, embed->weight);
  }
  nn::Embedding embed;
};
TORCH_MODULE(TiedHead);

struct NetImpl : nn::Module {
  NetImpl() {
    register_module("embed", embed);
    register_module("stem", stem);
    for (int i = 0; i < 11; ++i) layers->push_back(Block());
    register_module("layers", layers);
    register_module("head", head);
    to(device());
  }
  Tensor forward(const Tensor& tokens) {
    Tensor x = stem->forward(embed(tokens));
    for (const auto& layer : *layers) x = layer->as<Block>()->forward(x);
    return head(x);
  }
  nn::Embedding embed{kTokens, kModelWidth};
  nn::Sequential stem{nn::Linear(kModelWidth, kModelWidth), nn::Tanh()};
  nn::ModuleList layers;
  TiedHead head{embed};
};
TORCH_MODULE(Net);

Tensor tokens() {
  return torch::randint(0, kTokens, {2, 5}, on_device(torch::kLong));
}

Tensor loss_of(const Tensor& logits, const Tensor& targets) {
  return nn::functional::cross_entropy(
      logits.flatten(0, 1), targets.flatten(),
      nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
}

std::vector<std::string> names_of(const Chain& chain) {
  std::vector<std::string> names;
  for (int i = 0; i < chain.size(); ++i) names.push_back(chain[i].name());
  return names;
}

TEST(ChainOf, EqualsTheModel) {
  torch::manual_seed(3);
  Net model;
  const auto x = tokens();
  const auto targets = tokens();
  torch::manual_seed(5);
  const auto expected = loss_of(model->forward(x), targets);
  expected.backward();
  const auto gradients = take_gradients(model->parameters());

  const Chain chain = chain_of<BlockImpl, TiedHead>(
      *model, {"embed", "stem", "layers.*", "head", {"loss", loss_of}});
  ASSERT_EQ(chain.size(), 15);
  // The model lists the shared weight twice.
  EXPECT_EQ(chain.parameters().size() + 1, model->parameters().size());
  check_chain(chain, {x, targets});
  for (const char* strategy : {"none", "all", "sqrt", "revolve:2"}) {
    torch::manual_seed(5);
    const auto loss =
        chain.forward({x, targets}, make_schedule(strategy, chain.size()));
    ASSERT_EQ(loss.size(), 1u);
    EXPECT_TRUE(same(loss[0], expected)) << strategy;
    loss[0].backward();
    const auto got = take_gradients(model->parameters());
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(same(got[i], gradients[i])) << strategy << ' ' << i;
    }
  }
}

TEST(ChainOf, NamesStagesInTheOrderOfRegistration) {
  Net model;
  const auto names = names_of(chain_of<Block, TiedHead>(
      *model, {"embed", "stem.*", "layers.*", "head"}));
  const std::vector<std::string> expected = {
      "embed",    "stem.0",   "stem.1",   "layers.0",  "layers.1",
      "layers.2", "layers.3", "layers.4", "layers.5",  "layers.6",
      "layers.7", "layers.8", "layers.9", "layers.10", "head"};
  EXPECT_EQ(names, expected);
}

TEST(ChainOf, MatchesComponentsInTheMiddle) {
  Net model;
  const Chain chain =
      chain_of(*model, {"layers.*.mlp"}, {.allow_unused_parameters = true});
  ASSERT_EQ(chain.size(), 11);
  EXPECT_EQ(chain[10].name(), "layers.10.mlp");
  EXPECT_EQ(chain[10].modules().at(0),
            model->layers[10]->as<Block>()->mlp.ptr());
}

TEST(ChainOf, KnowsLibTorchModules) {
  nn::Sequential model(nn::Conv2d(nn::Conv2dOptions(3, 4, 3)),
                       nn::BatchNorm2d(4), nn::ReLU(), nn::MaxPool2d(2),
                       nn::GroupNorm(nn::GroupNormOptions(2, 4)),
                       nn::AdaptiveAvgPool2d(2), nn::Flatten(),
                       nn::Linear(16, 5), nn::LogSoftmax(1));
  model->to(device());
  const auto x = torch::randn({2, 3, 9, 9}, on_device());
  model->forward(x).square().sum().backward();
  const auto expected = take_gradients(model->parameters());
  const Chain chain = chain_of(*model, {"*"});
  ASSERT_EQ(chain.size(), 9);
  chain.forward(x, make_schedule("all", 9)).square().sum().backward();
  const auto got = take_gradients(model->parameters());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(same(got[i], expected[i])) << i;
  }
}

/// Takes two tensors and returns a tuple.
struct PairImpl : nn::Module {
  PairImpl() { register_module("linear", linear); }
  std::tuple<Tensor, Tensor> forward(const Tensor& x, const Tensor& y) {
    return {linear(x) * y, y + 1};
  }
  nn::Linear linear{kModelWidth, kModelWidth};
};

/// Takes and returns a list.
struct ListImpl : nn::Module {
  Tensors forward(const Tensors& in) { return {in.at(0) - in.at(1)}; }
};

struct PairNet : nn::Module {
  PairNet() {
    register_module("pair", pair);
    register_module("act", act);
    register_module("list", list);
    to(device());
  }
  Tensor forward(const Tensor& x, const Tensor& y) {
    const auto [a, b] = pair->forward(x, y);
    return list->forward({act(a), b}).at(0);
  }
  std::shared_ptr<PairImpl> pair = std::make_shared<PairImpl>();
  nn::Sigmoid act;
  std::shared_ptr<ListImpl> list = std::make_shared<ListImpl>();
};

TEST(ChainOf, SupportsSeveralTensors) {
  PairNet model;  // not owned by a shared_ptr
  const auto x = torch::randn({3, kModelWidth}, on_device());
  const auto y = torch::randn({3, kModelWidth}, on_device());
  const Chain chain =
      chain_of<PairImpl, ListImpl>(model, {"pair", "act", "list"});
  EXPECT_EQ(chain[0].takes(), 2);
  const auto got = chain.forward({x, y}, make_schedule("all", 3));
  ASSERT_EQ(got.size(), 1u);
  EXPECT_TRUE(same(got[0], model.forward(x, y)));
}

TEST(ChainOf, TakesFunctionsAndStages) {
  nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4));
  model->to(device());
  nn::Linear extra(4, 4);
  extra->to(device());
  const Stage twice = make_stage("twice", [](const Tensors& in) {
    return Tensors{in.at(0) * 2, in.at(1)};
  });
  const Chain chain =
      chain_of(*model, {"0",
                        {"flip", [](const Tensor& x) { return x.flip(0); }},
                        {"extra",
                         [extra](const Tensor& x) mutable { return extra(x); },
                         {extra.ptr()}},
                        twice,
                        "1",
                        {"mse", nn::MSELoss()}});
  EXPECT_EQ(names_of(chain), (std::vector<std::string>{"0", "flip", "extra",
                                                       "twice", "1", "mse"}));
  EXPECT_EQ(chain.parameters().size(), 6u);
  const auto x = torch::randn({3, 4}, on_device());
  const auto y = torch::randn({3, 4}, on_device());
  nn::Linear first(model->ptr<nn::LinearImpl>(0));
  nn::Linear second(model->ptr<nn::LinearImpl>(1));

  const auto expected =
      nn::functional::mse_loss(second(extra(first(x).flip(0)) * 2), y);
  EXPECT_TRUE(
      same(chain.forward({x, y}, make_schedule("sqrt", 6)).at(0), expected));
}

TEST(ChainOf, RunsAModuleUnderTwoNamesTwice) {
  nn::Linear shared(4, 4);
  nn::Sequential model(shared, nn::Tanh(), shared);
  model->to(device());
  const auto x = torch::randn({3, 4}, on_device());
  const Chain chain = chain_of(*model, {"*"});
  EXPECT_EQ(chain.size(), 3);
  EXPECT_TRUE(
      same(chain.forward(x, make_schedule("all", 3)), model->forward(x)));
}

/// Hides the forward of its base.
struct DoubledImpl : nn::LinearImpl {
  using nn::LinearImpl::LinearImpl;
  Tensor forward(const Tensor& x) { return 2 * nn::LinearImpl::forward(x); }
};

/// Base with a virtual forward.
struct AnyBlock : nn::Module {
  virtual Tensor forward(const Tensor& x) = 0;
};
struct Squares : AnyBlock {
  Tensor forward(const Tensor& x) override { return x.square(); }
};

TEST(ChainOf, UsesTheForwardOfTheExactType) {
  nn::Sequential model(DoubledImpl(4, 4));
  model->to(device());
  EXPECT_TRUE(mentions(error_of([&] { chain_of(*model, {"0"}); }),
                       "expected a known type for module '0'"));
  // A listed base that is not abstract does not stand for derived types.
  EXPECT_TRUE(
      mentions(error_of([&] { chain_of<nn::LinearImpl>(*model, {"0"}); }),
               "expected a known type for module '0'"));
  const auto x = torch::randn({3, 4}, on_device());
  EXPECT_TRUE(same(
      chain_of<DoubledImpl>(*model, {"0"}).forward(x, make_schedule("none", 1)),
      model->forward(x)));
}

TEST(ChainOf, AbstractTypesStandForDerivedOnes) {
  struct Holder : nn::Module {
    Holder() { register_module("block", std::make_shared<Squares>()); }
  };
  const auto x = torch::randn({3}, on_device());
  EXPECT_TRUE(same(chain_of<AnyBlock>(Holder(), {"block"})
                       .forward(x, make_schedule("none", 1)),
                   x.square()));
}

TEST(ChainOf, PassesTargetsThroughModulesOfOneTensor) {
  nn::Sequential model(nn::Linear(4, 4), nn::ReLU());
  model->to(device());
  const Chain chain = chain_of(*model, {"*"});
  const auto x = torch::randn({3, 4}, on_device());
  const auto y = torch::arange(3, on_device());
  const auto got = chain.forward({x, y}, make_schedule("all", 2));
  ASSERT_EQ(got.size(), 2u);
  EXPECT_TRUE(same(got[0], model->forward(x)));
  EXPECT_TRUE(torch::equal(got[1], y));
}

struct ErrorNet : nn::Module {
  ErrorNet() {
    register_module("embed", nn::Linear(4, 4));
    register_module("layers", nn::ModuleList(Block(), Block()));
    register_module("more", nn::ModuleDict());
    scale = register_parameter("scale", torch::ones({1}));
  }
  Tensor scale;
};

TEST(ChainOf, RejectsWrongLists) {
  const ErrorNet model;
  const auto expect = [&](std::vector<ChainPart> parts,
                          const std::string& text) {
    const auto got = error_of([&] { chain_of<Block>(model, parts); });
    EXPECT_TRUE(mentions(got, text)) << got;
  };
  expect({"embd"},
         "[chain_of] expected the name of a module, got 'embd'; did you mean "
         "embed?");
  expect({"layer.0"}, "did you mean layers.0?");
  expect({"xyzzy"}, "the model's modules are 'embed', 'layers', 'layers.0'");
  expect({"layers.0."}, "got 'layers.0.'");
  expect({""}, "expected the name of a module, got ''");
  expect({"heads.*"}, "got 'heads.*', which matches none");
  expect({"*.*.*.*.*"}, "which matches none");
  expect({"layers"}, "; its entries are 'layers.*'");
  expect({"more"}, "; its entries are 'more.*'");
  expect({"layers.*", "layers.1"},
         "expected each module once, got 'layers.1' "
         "twice");
  expect({"layers.1", "layers.1.mlp"},
         "got 'layers.1.mlp' also as a part of "
         "'layers.1'");
  expect({"layers.1.mlp", "layers.1"},
         "got 'layers.1.mlp' also as a part of "
         "'layers.1'");
  expect({"embed", "layers.*"}, "got none for 'scale'; the chain would not");
  expect({"embed"}, "and 14 more");
  const auto unknown = error_of([&] { chain_of(model, {"layers.*"}); });
  EXPECT_TRUE(mentions(unknown, "expected a known type for module 'layers.0'"))
      << unknown;
  EXPECT_TRUE(mentions(unknown, "BlockImpl; add it to the template arguments"))
      << unknown;
  EXPECT_TRUE(mentions(
      error_of([&] { chain_of(model, {}, {.allow_unused_parameters = true}); }),
      "expected at least one stage"));
  EXPECT_EQ(chain_of<Block>(model, {"embed", "layers.*"},
                            {.allow_unused_parameters = true})
                .size(),
            3);
}

}  // namespace
}  // namespace reprise
