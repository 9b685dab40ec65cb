#include "region_net.h"

#include <reprise/accumulate/accumulator.h>
#include <reprise/memory/meter.h>
#include <reprise/recompute/strategy.h>
#include <reprise/train/own_loop.h>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <barrier>
#include <mutex>
#include <thread>

/// plan_model() and PlannedStep: plans for a loop of the caller.
namespace reprise {
namespace {

using testing::device;
using testing::error_of;
using testing::make_region_net;
using testing::region_chain;
using testing::RegionNet;
using testing::same;

Batch batch_of(Tensors tensors) {
  const int64_t samples = tensors[0].size(0);
  return {.tensors = std::move(tensors), .samples = samples, .count = samples};
}

/// Blocks of linear layers, as a chain on {x, y}.
struct Perceptron : torch::nn::Module {
  explicit Perceptron(int depth = 5, int64_t width = 64, bool norms = false) {
    for (int i = 0; i < depth; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i),
                                       torch::nn::Linear(width, width)));
      if (norms) {
        norm.push_back(register_module("norm" + std::to_string(i),
                                       torch::nn::BatchNorm1d(width)));
      }
    }
  }
  torch::Tensor hidden(size_t i, const torch::Tensor& x) {
    const torch::Tensor y = torch::gelu(layers[i](x));
    return norm.empty() ? y : norm[i](y);
  }
  torch::Tensor loss(const Tensors& in) {
    torch::Tensor x = in[0];
    for (size_t i = 0; i < layers.size(); ++i) x = hidden(i, x);
    return (x - in[1]).square().sum();
  }
  std::vector<torch::nn::Linear> layers;
  std::vector<torch::nn::BatchNorm1d> norm;
};

Model model_of(const std::shared_ptr<Perceptron>& net) {
  std::vector<Stage> stages;
  for (size_t i = 0; i < net->layers.size(); ++i) {
    Modules modules = {net->layers[i].ptr()};
    if (!net->norm.empty()) modules.push_back(net->norm[i].ptr());
    stages.push_back(
        make_stage(
            "layer" + std::to_string(i),
            [net, i](const torch::Tensor& x) { return net->hidden(i, x); },
            modules)
            .on_first());
  }
  stages.push_back(
      make_stage("loss", [](const torch::Tensor& x, const torch::Tensor& y) {
        return (x - y).square().sum();
      }));
  return {.name = "perceptron", .root = net, .chain = Chain(stages)};
}

std::shared_ptr<Perceptron> make_perceptron(int depth = 5, bool norms = false) {
  torch::manual_seed(2);
  auto net = std::make_shared<Perceptron>(depth, 64, norms);
  net->to(device());
  return net;
}

Tensors random_inputs(int64_t samples, uint64_t seed = 4) {
  torch::manual_seed(seed);
  return {torch::randn({samples, 64}, testing::on_device()),
          torch::randn({samples, 64}, testing::on_device())};
}

/// What to plan for, and options of quick measurements.
struct Asked : PlanRequest {
  ModelPlanOptions with{.planning = {.quick = true}};
};

Asked quick(int64_t global_batch, int64_t memory = 0) {
  Asked asked;
  asked.global_batch = global_batch;
  asked.memory = memory;
  return asked;
}

template <class Sample>
PlanResult plan_asked(const Model& model, const Sample& sample,
                      const Asked& asked) {
  return plan_model(model, sample, asked, asked.with);
}

/// Sets the budget halfway between the least that a plan needs and `most`.
void tighten(Asked& asked, const Model& model, const Batch& batch,
             int64_t most) {
  asked.strategy.clear();
  asked.margin = 0;
  asked.memory = 1;
  asked.memory = (plan_asked(model, batch, asked).smallest_bytes + most) / 2;
}

/// State that plan_model() and verify() must not change.
std::vector<torch::Tensor> state_of(const torch::nn::Module& module) {
  std::vector<torch::Tensor> list;
  for (const auto& p : module.parameters()) {
    list.push_back(p.detach().clone());
    list.push_back(p.grad().defined() ? p.grad().clone() : torch::Tensor());
  }
  for (const auto& b : module.buffers()) list.push_back(b.clone());
  list.push_back(at::detail::getDefaultCPUGenerator().get_state());
  return list;
}

void expect_unchanged(const std::vector<torch::Tensor>& before,
                      const std::vector<torch::Tensor>& after) {
  ASSERT_EQ(before.size(), after.size());
  for (size_t i = 0; i < before.size(); ++i) {
    ASSERT_EQ(before[i].defined(), after[i].defined()) << i;
    if (before[i].defined()) {
      EXPECT_TRUE(before[i].equal(after[i])) << i;
    }
  }
}

/// Trains two windows of `batch` with a PlannedStep, and returns the peak.
int64_t train_planned(const Model& model, const Plan& plan,
                      const Tensors& batch, std::vector<double>& losses) {
  torch::optim::AdamW optimizer(model.root->parameters(),
                                torch::optim::AdamWOptions(1e-2));
  PlannedStep step(model, plan);
  const MemoryMeter meter(device());
  for (int window = 0; window < 2; ++window) {
    step.begin(static_cast<double>(batch[0].size(0)));
    for (const Tensors& micro : split(batch, plan.micro_batch)) {
      step.add(micro, static_cast<double>(micro[0].size(0)));
    }
    step.clip(1.0);
    losses.push_back(step.update(optimizer));
  }
  return meter.peak_bytes();
}

/// The same with LibTorch alone.
void train_plainly(torch::nn::Module& root,
                   const std::function<torch::Tensor(const Tensors&)>& loss_of,
                   int64_t micro_batch, const Tensors& batch,
                   std::vector<double>& losses) {
  torch::optim::AdamW optimizer(root.parameters(),
                                torch::optim::AdamWOptions(1e-2));
  const auto count = static_cast<double>(batch[0].size(0));
  for (int window = 0; window < 2; ++window) {
    torch::Tensor sum;
    for (int64_t first = 0; first < batch[0].size(0); first += micro_batch) {
      Tensors micro;
      for (const auto& tensor : batch) {
        micro.push_back(tensor.slice(0, first, first + micro_batch));
      }
      const torch::Tensor loss = loss_of(micro);
      loss.backward(torch::full_like(loss, 1 / count));
      sum = sum.defined() ? sum + loss.detach() : loss.detach();
    }
    clip_gradients(root.parameters(), gradient_norm(root.parameters()), 1.0);
    optimizer.step();
    for (auto& p : root.parameters()) p.mutable_grad().reset();
    losses.push_back(sum.item<double>() / count);
  }
}

std::unique_ptr<Optimizer> wrapped_adamw(const NamedTensors& parameters) {
  std::vector<torch::Tensor> list;
  for (const auto& item : parameters) list.push_back(item.second);
  return wrap_optimizer(std::make_unique<torch::optim::AdamW>(
                            list, torch::optim::AdamWOptions(1e-3)),
                        parameters);
}

void expect_same_state(const torch::nn::Module& a, const torch::nn::Module& b) {
  const auto pairs = [](const torch::nn::Module& m) {
    auto list = m.parameters();
    for (const auto& buffer : m.buffers()) list.push_back(buffer);
    return list;
  };
  const auto left = pairs(a), right = pairs(b);
  ASSERT_EQ(left.size(), right.size());
  for (size_t i = 0; i < left.size(); ++i) {
    EXPECT_TRUE(same(left[i].detach(), right[i].detach())) << i;
  }
}

TEST(OwnLoop, TrainsWithinTheBudgetLikeAPlainLoop) {
  count_cpu_memory();
  const auto net = make_perceptron(6);
  const Model model = model_of(net);
  const Tensors batch = random_inputs(512);
  Asked options = quick(512);
  options.with.optimizer = wrapped_adamw;
  options.strategy = "none";
  options.micro_batch = 512;
  const auto most = plan_asked(model, batch_of(batch), options).plan;
  tighten(options, model, batch_of(batch), most.peak_bytes);
  const PlanResult tight = plan_asked(model, batch_of(batch), options);
  ASSERT_TRUE(tight.feasible);
  EXPECT_GT(tight.plan.schedule.total_runs(), model.chain.size());

  std::vector<double> losses, expected;
  const int64_t peak = train_planned(model, tight.plan, batch, losses);
  if (device().is_cpu()) {
    EXPECT_LE(peak, tight.plan.peak_bytes);
    EXPECT_GT(peak, tight.plan.peak_bytes * 8 / 10);  // not far below either
  }
  EXPECT_LE(tight.plan.peak_bytes, options.memory);
  const auto twin = make_perceptron(6);
  train_plainly(
      *twin, [&](const Tensors& in) { return twin->loss(in); },
      tight.plan.micro_batch, batch, expected);
  EXPECT_EQ(losses, expected);
  expect_same_state(*net, *twin);
}

TEST(OwnLoop, PlansAnArbitraryForwardByItsRegions) {
  count_cpu_memory();
  const auto net = make_region_net(8);
  torch::manual_seed(4);
  const Tensors batch = RegionNet::inputs(8, 24);
  Model model{.name = "net", .root = net, .chain = region_chain(net)};
  model.chain = with_region_variants(model.chain, batch);
  Asked options = quick(8);
  options.with.optimizer = wrapped_adamw;
  options.micro_batch = 8;
  options.strategy = "none";
  const auto most = plan_asked(model, batch_of(batch), options).plan;
  tighten(options, model, batch_of(batch), most.peak_bytes);
  const PlanResult result = plan_asked(model, batch_of(batch), options);
  ASSERT_TRUE(result.feasible);
  EXPECT_GT(result.plan.schedule.ops().at(0).variant, 0)
      << result.plan.schedule.to_text();
  const VerifyReport verified =
      verify(model.chain, batch, result.plan.schedule,
             {.updates = 1, .tolerance = device().is_cuda() ? 1e-5 : 0});
  EXPECT_TRUE(verified.same);
  EXPECT_GT(verified.rows.at(2).tensors, 0);  // buffers

  std::vector<double> losses, expected;
  torch::manual_seed(9);
  const int64_t peak = train_planned(model, result.plan, batch, losses);
  if (device().is_cpu()) {
    EXPECT_LE(peak, result.plan.peak_bytes);
  }
  const auto twin = make_region_net(8);
  torch::manual_seed(9);
  train_plainly(
      *twin, [&](const Tensors& in) { return twin->forward(in)[0]; }, 8, batch,
      expected);
  EXPECT_EQ(losses, expected);
  expect_same_state(*net, *twin);
}

TEST(OwnLoop, PlanningRestoresTheModel) {
  const auto net = make_perceptron(2, /*norms=*/true);
  const Tensors batch = random_inputs(8);
  net->loss(batch).backward();
  const auto before = state_of(*net);
  Asked options = quick(8, int64_t{1} << 30);
  options.with.optimizer = wrapped_adamw;
  options.micro_batch = 8;
  options.with.planning.quick = false;  // also times schedules
  plan_asked(model_of(net), batch_of(batch), options);
  expect_unchanged(before, state_of(*net));
}

TEST(OwnLoop, CountsTheOptimizer) {
  const auto net = make_perceptron();
  const Batch batch = batch_of(random_inputs(4));
  Asked options = quick(4);
  const Plan none = plan_asked(model_of(net), batch, options).plan;
  options.with.optimizer = wrapped_adamw;
  const Plan adamw = plan_asked(model_of(net), batch, options).plan;
  int64_t bytes = 0;
  for (const auto& p : net->parameters()) {
    bytes += allocated_bytes(static_cast<int64_t>(p.nbytes()), p.device());
  }
  EXPECT_EQ(none.peak.optimizer, 0);
  EXPECT_GE(adamw.peak.optimizer, 2 * bytes);
}

TEST(OwnLoop, TakesBatchesFromAFunction) {
  const auto net = make_perceptron();
  std::vector<int64_t> sizes;
  const PlanResult result = plan_asked(
      model_of(net),
      [&sizes](int64_t samples) {
        sizes.push_back(samples);
        return batch_of(random_inputs(samples));
      },
      quick(16));
  EXPECT_TRUE(result.feasible);
  EXPECT_TRUE(std::find(sizes.begin(), sizes.end(), 16) != sizes.end());
  EXPECT_GE(sizes.size(), 3u);
}

TEST(OwnLoop, SplitsAlongTheFirstDimension) {
  const auto x = torch::arange(10).view({5, 2});
  const auto parts = split({x, torch::Tensor(), torch::arange(5)}, 2);
  ASSERT_EQ(parts.size(), 3u);
  EXPECT_TRUE(parts[1][0].equal(x.slice(0, 2, 4)));
  EXPECT_TRUE(parts[1][0].is_alias_of(x));
  EXPECT_FALSE(parts[2][1].defined());
  EXPECT_EQ(parts[2][2].size(0), 1);
  const auto error = [](const Tensors& tensors, int64_t size) {
    return error_of([&] { split(tensors, size); });
  };
  EXPECT_NE(error({x}, 0).find("expected a positive"), std::string::npos);
  EXPECT_NE(error({x, torch::ones({4})}, 1).find("got 5 and 4"),
            std::string::npos);
  EXPECT_NE(error({torch::tensor(1.0)}, 1).find("first dimension"),
            std::string::npos);
}

TEST(OwnLoop, VerifiesAModelInPlace) {
  const auto net = make_perceptron(4, /*norms=*/true);
  const Batch batch = batch_of(random_inputs(6));
  net->loss(batch.tensors).backward();
  const auto before = state_of(*net);
  VerifyOptions options{.updates = 2,
                        .tolerance = device().is_cuda() ? 1e-5 : 0};
  const auto reports = verify(model_of(net), batch, options);
  EXPECT_GE(reports.size(), sample_strategies().size());
  for (const auto& report : reports) {
    EXPECT_TRUE(report.same) << report.strategy;
    EXPECT_EQ(report.subject, "perceptron");
    EXPECT_GT(report.rows.at(1).tensors, 0);
  }
  expect_unchanged(before, state_of(*net));
  // A stage that computes something else when it runs again.
  int runs = 0;
  Model wrong{
      .name = "wrong",
      .root = net,
      .chain = Chain(
          {make_stage("odd",
                      [net, &runs](const torch::Tensor& x) {
                        return net->hidden(0, x) + (++runs % 2) * 0.1;
                      },
                      {net})
               .on_first(),
           make_stage("middle",
                      [](const torch::Tensor& x) { return torch::sin(x); })
               .on_first(),
           model_of(net).chain[4]})};
  EXPECT_FALSE(verify(wrong, batch, Strategy::parse("all"), options).same);
  expect_unchanged(before, state_of(*net));
}

// Each wrong use has a sentence that says what to change.
TEST(OwnLoop, RefusesWrongLosses) {
  const auto net = make_perceptron(2);
  const Batch batch = batch_of(random_inputs(4));
  const auto with_loss = [&](const std::function<torch::Tensor(
                                 torch::Tensor, torch::Tensor)>& loss) {
    const Model model = model_of(net);
    return Model{.name = "own",
                 .root = net,
                 .chain = Chain({model.chain[0], model.chain[1],
                                 make_stage("loss", loss)})};
  };
  const auto error = [&](const Model& model) {
    return error_of([&] { plan_asked(model, batch, quick(4)); });
  };
  const auto mean =
      with_loss([](auto x, auto y) { return (x - y).square().mean(); });
  EXPECT_NE(error(mean).find("expected the sum of the losses, got a mean"),
            std::string::npos)
      << error(mean);
  Asked unchecked = quick(4);
  unchecked.with.check_loss = false;
  EXPECT_TRUE(plan_asked(mean, batch, unchecked).feasible);
  EXPECT_NE(error(with_loss([](auto x, auto y) {
              return (x - y).square();
            })).find("one floating-point value, got Float of shape [4, 64]"),
            std::string::npos);
  EXPECT_NE(error(with_loss([](auto x, auto y) {
              return (x - y).square().sum().detach();
            })).find("to return a tensor that requires a gradient"),
            std::string::npos);
  const Batch none{.tensors = {torch::Tensor()}};
  EXPECT_NE(error_of([&] {
              plan_asked(model_of(net), none, quick(4));
            }).find("expected a batch with tensors"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              plan_asked(Model{.chain = model_of(net).chain}, batch, quick(4));
            }).find("expected a model with a root"),
            std::string::npos);
}

TEST(OwnLoop, RefusesModelsThatShareParametersInOpenWindows) {
  const auto net = make_perceptron(2);
  const Model model = model_of(net);
  const Batch batch = batch_of(random_inputs(4));
  const Plan plan = plan_asked(model, batch, quick(4)).plan;
  PlannedStep first(model, plan), second(model, plan);
  first.begin(4);
  EXPECT_NE(error_of([&] {
              second.begin(4);
            }).find("that another window accumulates into"),
            std::string::npos);
  first.abandon();
  second.begin(4);
  second.add(batch.tensors, 4);
  second.abandon();
  // A second network in the chain that this model does not own.
  const auto other = make_perceptron(2);
  Model joined = model;
  joined.chain =
      Chain({model.chain[0], model_of(other).chain[1], model.chain[2]});
  PlannedStep third(joined, plan);
  EXPECT_NE(
      error_of([&] { third.begin(4); }).find("which Model::root does not own"),
      std::string::npos);
  for (auto& p : other->parameters()) p.set_requires_grad(false);
  third.begin(4);
  third.add(batch.tensors, 4);
  EXPECT_FALSE(other->parameters()[0].grad().defined());
  third.abandon();
  EXPECT_NE(
      error_of([&] { third.add(batch.tensors, 4); }).find("no window is open"),
      std::string::npos);
}

/// Trains 20 windows of a model of its own. `seeds` protects the generator, which
/// all threads share.
std::vector<torch::Tensor> train_own(uint64_t seed, std::mutex& seeds,
                                     std::barrier<>& meet) {
  std::unique_lock lock(seeds);
  const Model model = model_of(make_perceptron(4));
  const Tensors batch = random_inputs(16, seed);
  lock.unlock();
  const Plan plan{.global_batch = 16,
                  .micro_batch = 4,
                  .accumulate = 4,
                  .last_micro_batch = 4,
                  .schedule = make_schedule("all", model.chain.size())};
  PlannedStep step(model, plan);
  torch::optim::SGD optimizer(model.root->parameters(), 0.01);
  for (int window = 0; window < 20; ++window) {
    meet.arrive_and_wait();
    step.begin(16);
    for (const Tensors& micro : split(batch, 4)) step.add(micro, 4);
    step.update(optimizer);
  }
  return model.root->parameters();
}

// Models without random numbers share nothing that changes results.
TEST(OwnLoop, TwoThreadsTrainTwoModels) {
  std::mutex seeds;
  std::barrier<> alone(1), meet(2);
  const auto expected_a = train_own(11, seeds, alone);
  const auto expected_b = train_own(12, seeds, alone);
  std::vector<torch::Tensor> a, b;
  std::thread one([&] { a = train_own(11, seeds, meet); });
  std::thread two([&] { b = train_own(12, seeds, meet); });
  one.join();
  two.join();
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(same(expected_a[i].detach(), a[i].detach())) << i;
    EXPECT_TRUE(same(expected_b[i].detach(), b[i].detach())) << i;
    EXPECT_FALSE(a[i].equal(b[i])) << i;
  }
}

}  // namespace
}  // namespace reprise
