#include "train/runs.h"

#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include <cmath>

/// A model, a dataset and an optimizer that are not built in: batches of three tensors, a
/// count that differs from sample to sample, two metrics.
namespace reprise {
namespace {

using testing::device;
using testing::error_of;
using testing::on_device;
using testing::relative_error;
using testing::same;

constexpr int64_t kSamples = 12;
constexpr int64_t kLength = 5;
constexpr int64_t kWidth = 8;

/// Sequences of vectors with a mask and one value per position to predict.
class Sequences final : public Dataset {
 public:
  explicit Sequences(uint64_t seed = 1) {
    torch::manual_seed(seed);
    x = torch::randn({kSamples, kLength, kWidth});
    mask = torch::rand({kSamples, kLength}) < 0.7;
    mask.select(1, 0).fill_(true);
    y = torch::randn({kSamples, kLength});
  }
  int64_t size() const override { return kSamples; }
  int64_t count(int64_t i) const override {
    return empty ? 0 : mask[i].sum().item<int64_t>();
  }
  Batch get(const std::vector<int64_t>& indices) const override {
    const auto list = torch::tensor(indices);
    Batch batch{.tensors = {x.index_select(0, list), mask.index_select(0, list),
                            y.index_select(0, list)},
                .samples = static_cast<int64_t>(indices.size())};
    for (const int64_t i : indices) batch.count += count(i);
    return batch;
  }
  std::string description() const override { return "masked sequences"; }

  torch::Tensor x, mask, y;
  bool empty = false;
};

struct Net : torch::nn::Module {
  Net() {
    register_module("first", first);
    register_module("second", second);
    register_module("head", head);
  }

  torch::Tensor errors(const torch::Tensor& x, const torch::Tensor& y) {
    const auto hidden = torch::tanh(second(torch::tanh(first(x))));
    return head(hidden).squeeze(-1) - y;
  }

  torch::nn::Linear first{kWidth, 16}, second{16, 16}, head{16, 1};
};

Tensors sums(const torch::Tensor& errors, const torch::Tensor& mask) {
  const auto weights = mask.to(torch::kFloat);
  return {(errors.pow(2) * weights).sum(),
          (errors.abs() * weights).sum().to(torch::kDouble),
          ((errors.abs() < 0.5).to(torch::kFloat) * weights)
              .sum()
              .to(torch::kDouble)};
}

Chain chain_of(const std::shared_ptr<Net>& net) {
  const auto hidden = [](torch::nn::Linear layer) {
    return [layer](const torch::Tensor& x) mutable {
      return torch::tanh(layer(x));
    };
  };
  return Chain(
      {make_stage("first", hidden(net->first), {net->first.ptr()}).on_first(),
       make_stage("second", hidden(net->second), {net->second.ptr()})
           .on_first(),
       make_stage("loss",
                  [net](const torch::Tensor& h, const torch::Tensor& mask,
                        const torch::Tensor& y) {
                    return sums(net->head(h).squeeze(-1) - y, mask);
                  },
                  {net->head.ptr()})});
}

TrainInputs own_inputs(bool own_optimizer = true) {
  torch::manual_seed(7);
  const auto net = std::make_shared<Net>();
  TrainInputs inputs{
      Model{.name = "own",
            .root = net,
            .chain = chain_of(net),
            .metrics = {"error", "accuracy"}},
      {.name = "sequences", .train = std::make_shared<Sequences>()}};
  if (own_optimizer) {
    inputs.optimizer = [](const NamedTensors& parameters) {
      std::vector<torch::Tensor> list;
      for (const auto& item : parameters) list.push_back(item.second);
      return wrap_optimizer(std::make_unique<torch::optim::Adam>(
                                list, torch::optim::AdamOptions(0.01)),
                            parameters);
    };
  }
  return inputs;
}

TrainOptions own_options() {
  TrainOptions options;
  options.device = device().str();
  options.batch = 3;
  options.global_batch = kSamples;
  options.epochs = 4;
  options.workers = 1;
  options.rate.base = 0.01;
  options.graph = GraphMode::kOff;
  return options;
}

std::vector<torch::Tensor> trained(TrainOptions options,
                                   TrainInputs inputs = own_inputs(),
                                   TrainListener* listener = nullptr) {
  options.resolve();
  Trainer trainer(std::move(inputs), options);
  TrainRun run;
  run.listener = listener;
  trainer.run(run);
  std::vector<torch::Tensor> list;
  for (const auto& p : trainer.model().root->parameters()) {
    list.push_back(p.detach().clone());
  }
  return list;
}

/// The truth: the same updates in a loop of LibTorch alone, with the whole batch.
TEST(OwnModel, TrainsAsAPlainLoop) {
  torch::manual_seed(7);
  Net net;
  net.to(device());
  const Sequences data;
  const auto x = data.x.to(device()), mask = data.mask.to(device()),
             y = data.y.to(device());
  torch::optim::Adam optimizer(net.parameters(),
                               torch::optim::AdamOptions(0.01));
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    const auto loss = sums(net.errors(x, y), mask)[0] / mask.sum();
    loss.backward();
    optimizer.step();
  }
  const auto plain = trained(own_options());
  const auto expected = net.parameters();
  ASSERT_EQ(plain.size(), expected.size());
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_LT(relative_error(expected[i].detach(), plain[i]), 1e-5) << i;
  }
  TrainOptions recomputed = own_options();
  recomputed.recompute = "all";
  const auto again = trained(recomputed);
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_TRUE(same(again[i], plain[i])) << i;
  }
}

TEST(OwnModel, PreparesEachBatchOnce) {
  for (const ResizePlace place :
       {ResizePlace::kDevice, ResizePlace::kWorkers}) {
    TrainInputs inputs = own_inputs();
    inputs.data.prepare = [](Batch& batch) {
      batch.tensors[0] = batch.tensors[0] * 2;
    };
    TrainOptions options = own_options();
    options.resize = place;
    const auto prepared = trained(options, std::move(inputs));

    TrainInputs doubled = own_inputs();
    auto data = std::make_shared<Sequences>();
    data->x = data->x * 2;
    doubled.data.train = data;
    const auto expected = trained(own_options(), std::move(doubled));
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(same(prepared[i], expected[i])) << to_text(place) << i;
    }
  }
}

struct Events : TrainListener {
  void gradients_ready(int64_t step, const NamedTensors& parameters) override {
    ready.push_back(step);
    names = parameters.size();
    if (!freeze) return;
    for (auto& item : parameters)
      torch::Tensor(item.second).mutable_grad().zero_();
  }
  void updated(int64_t step) override { updates.push_back(step); }
  void evaluated(const Evaluation& evaluation) override { last = evaluation; }

  bool freeze = false;
  size_t names = 0;
  std::vector<int64_t> ready, updates;
  Evaluation last;
};

TEST(OwnModel, ListenersSeeAndChangeGradients) {
  const std::vector<int64_t> steps = {1, 2, 3, 4};
  Events seen;
  trained(own_options(), own_inputs(), &seen);
  EXPECT_EQ(seen.ready, steps);
  EXPECT_EQ(seen.updates, steps);
  EXPECT_EQ(seen.names, 6u);

  TrainOptions options = own_options();
  options.optimizer.name = "sgd";
  Events frozen;
  frozen.freeze = true;
  TrainInputs inputs = own_inputs(/*own_optimizer=*/false);
  std::vector<torch::Tensor> before;
  for (const auto& p : inputs.model.root->parameters()) {
    before.push_back(p.detach().clone());
  }
  const auto after = trained(options, std::move(inputs), &frozen);
  for (size_t i = 0; i < after.size(); ++i) {
    EXPECT_TRUE(torch::equal(after[i].cpu(), before[i])) << i;
  }
}

TEST(OwnModel, IsTrainedOnADataset) {
  const auto expected = trained(own_options(), own_inputs(false));
  const TrainInputs inputs = own_inputs(false);
  Trainer trainer(inputs.model, inputs.data.train, own_options());
  trainer.run();
  const auto parameters = trainer.model().root->parameters();
  ASSERT_EQ(parameters.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(same(expected[i], parameters[i].detach())) << i;
  }
}

/// The truth: the rates that a schedule of the options gives.
TEST(OwnModel, HasALearningRateOfItsOwn) {
  TrainOptions options = own_options();
  options.epochs = 0;
  options.steps = 6;
  options.rate.schedule = LrScheduleKind::kCosine;
  const auto expected = trained(options);
  LrScheduleOptions cosine = options.rate;
  cosine.total_steps = 6;
  options.rate = {};
  TrainInputs inputs = own_inputs();
  inputs.learning_rate = [cosine](int64_t step) {
    return rate_at(cosine, step);
  };
  const auto got = trained(options, std::move(inputs));
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(same(expected[i], got[i])) << i;
  }
  inputs = own_inputs();
  inputs.learning_rate = [](int64_t) { return -1.0; };
  const auto text = error_of([&] { trained(options, std::move(inputs)); });
  EXPECT_NE(text.find("to return 0 or more, got -1 for update 0"),
            std::string::npos)
      << text;
}

TEST(OwnModel, EvaluatesItsMetrics) {
  TrainInputs inputs = own_inputs();
  const auto test = std::make_shared<Sequences>(5);
  inputs.data.test = test;
  Events events;
  TrainOptions options = own_options();
  options.resolve();
  Trainer trainer(std::move(inputs), options);
  TrainRun run;
  run.listener = &events;
  const TrainResult result = trainer.run(run);
  Net net;
  const auto trained_net = std::dynamic_pointer_cast<Net>(trainer.model().root);
  const torch::NoGradGuard no_grad;
  const auto expected =
      sums(trained_net->errors(test->x.to(device()), test->y.to(device())),
           test->mask.to(device()));
  const double count = test->mask.sum().item<double>();
  EXPECT_NEAR(events.last.loss, expected[0].item<double>() / count, 1e-6);
  ASSERT_EQ(events.last.metrics.size(), 2u);
  EXPECT_NEAR(events.last.metrics.at("error"),
              expected[1].item<double>() / count, 1e-6);
  EXPECT_NEAR(events.last.metrics.at("accuracy"),
              expected[2].item<double>() / count, 1e-9);
  EXPECT_EQ(result.summary.eval_metrics, events.last.metrics);
  const TrainSummary read = summary_from_json(to_json(result.summary));
  EXPECT_EQ(read.eval_metrics, result.summary.eval_metrics);
  EXPECT_NE(to_table(read).find("Test error"), std::string::npos);
}

TEST(OwnModel, IsPlannedWithinABudget) {
  TrainOptions options = own_options();
  options.batch = 0;
  options.memory_limit = testing::enough_memory();
  options.resolve();
  Trainer trainer(own_inputs(), options);
  const TrainSummary summary = trainer.run().summary;
  ASSERT_TRUE(summary.predicted.has_value());
  EXPECT_EQ(summary.optimizer, "own");
  EXPECT_LE(summary.peak_bytes, options.memory_limit);
  EXPECT_EQ(summary.replans, 0);
}

/// What would train nothing, or something else, is refused before the first update.
TEST(OwnModel, RefusesAChainThatCannotBeTrained) {
  const auto refused = [](const std::function<Chain(Net&, Chain)>& change) {
    return error_of([&] {
      TrainInputs inputs = own_inputs();
      auto& net = dynamic_cast<Net&>(*inputs.model.root);
      inputs.model.chain = change(net, inputs.model.chain);
      TrainOptions options = own_options();
      options.resolve();
      const Trainer trainer(std::move(inputs), options);
    });
  };
  const auto with_last = [](const Chain& chain, const Stage& last) {
    return Chain({chain[0], chain[1], last});
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  std::string text = refused([&](Net& net, const Chain& chain) {
    const auto mean = [head = net.head](const torch::Tensor& h,
                                        const torch::Tensor&,
                                        const torch::Tensor& y) mutable {
      return (head(h).squeeze(-1) - y).pow(2).mean();
    };
    return with_last(chain, make_stage("mean", mean, {net.head.ptr()}));
  });
  EXPECT_TRUE(has(text, "got a mean")) << text;

  text = refused([&](Net& net, const Chain& chain) {
    const auto own = torch::ones(
        {1}, torch::dtype(torch::kFloat).device(device()).requires_grad(true));
    const auto scaled = [own, last = chain[2]](const Tensors& in) {
      return Tensors{last(in)[0] * own};
    };
    return with_last(chain, make_stage("scaled", scaled, {net.head.ptr()}));
  });
  EXPECT_TRUE(has(text, "to use parameters of its modules only")) << text;

  text = refused([&](Net&, const Chain& chain) {
    auto other = torch::nn::Linear(kWidth, 16);
    other->to(device());
    return Chain({make_stage("other", other).on_first(), chain[1], chain[2]});
  });
  EXPECT_TRUE(has(text, "which Model::root does not own")) << text;

  text = refused([](Net&, const Chain& chain) {
    return Chain({chain[0],
                  make_stage("changed",
                             [](const Tensors& in) {
                               in[0].mul_(2);
                               return in;
                             }),
                  chain[1], chain[2]});
  });
  EXPECT_TRUE(has(text, "modified in place")) << text;

  text = refused([](Net&, const Chain& chain) {
    return Chain({chain[1], chain[2]});
  });
  EXPECT_TRUE(has(text, "'second'")) << text;
}

TEST(OwnModel, ErrorsSayWhatToDo) {
  const auto error = [](const std::function<void(TrainInputs&)>& change,
                        TrainOptions options = own_options()) {
    return error_of([&] {
      TrainInputs inputs = own_inputs();
      change(inputs);
      options.resolve();
      Trainer trainer(std::move(inputs), options);
      trainer.run();
    });
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  std::string text = error([](TrainInputs& inputs) {
    inputs.model.chain = Chain({make_stage(
        "bad", [](const Tensors& in) { return Tensors{in[0].sum(-1)}; })});
  });
  EXPECT_TRUE(has(text, "the sum of the losses")) << text;
  text = error([](TrainInputs& inputs) {
    inputs.data.test = inputs.data.train;
    inputs.model.metrics = {"only one"};
  });
  EXPECT_TRUE(has(text, "Model::metrics, got 3")) << text;
  text = error([](TrainInputs& inputs) {
    inputs.optimizer = [](const NamedTensors&) { return nullptr; };
  });
  EXPECT_TRUE(has(text, "to return an optimizer, got null")) << text;
  TrainOptions sharded = own_options();
  sharded.shard = Sharding::kOptimizer;
  text = error([](TrainInputs&) {}, sharded);
  EXPECT_TRUE(has(text, "[--shard] an own optimizer cannot be sharded"))
      << text;
  text = error([](TrainInputs& inputs) {
    const auto data = std::make_shared<Sequences>();
    data->empty = true;
    inputs.data.train = data;
  });
  EXPECT_TRUE(has(text, "count")) << text;
  text = error([](TrainInputs& inputs) { inputs.data.train = nullptr; });
  EXPECT_TRUE(has(text, "expected a model and training data")) << text;
}

}  // namespace
}  // namespace reprise
