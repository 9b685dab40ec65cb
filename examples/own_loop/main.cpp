// A training loop that stays the program's own, in three steps from least to most:
//
//   1. checkpoint() and Accumulator inside the loop, chosen by hand.
//   2. region() marks in the forward, and plan_model(): the planner chooses what is
//      recomputed, and the micro-batch, for a memory budget.
//   3. PlannedStep runs the plan.
//
// Checks that all of them give the bits of a plain LibTorch loop, and that the planned one
// stays within its budget.
#include <reprise/train.h>

#include <torch/torch.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

namespace {

using reprise::Tensors;
using torch::Tensor;

constexpr int64_t kSamples = 64;  // per update
constexpr int kUpdates = 3;

/// Two convolutions.
struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t in, int64_t out)
      : first(register_module(
            "first", torch::nn::Conv2d(
                         torch::nn::Conv2dOptions(in, out, 3).padding(1)))),
        second(register_module(
            "second", torch::nn::Conv2d(
                          torch::nn::Conv2dOptions(out, out, 3).padding(1)))) {}
  Tensor forward(const Tensor& x) {
    return torch::gelu(second(torch::gelu(first(x))));
  }
  torch::nn::Conv2d first, second;
};
TORCH_MODULE(Block);

/// A small U-Net. Its forward is no sequence of modules: skip connections cross it.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("outer", outer);
    register_module("inner", inner);
    register_module("join", join);
    register_module("head", head);
  }

  /// Sum of the losses of {x, y}. Each region is recomputed if the plan says so.
  Tensor loss(const Tensors& in) {
    const Tensor a = reprise::region("outer", outer, in[0]);
    const Tensor b = reprise::region("inner", inner, torch::max_pool2d(a, 2));
    const auto decode = [join = join](const Tensor& low,
                                      const Tensor& skip) mutable {
      const Tensor up =
          torch::upsample_nearest2d(low, {skip.size(2), skip.size(3)});
      return join(torch::cat({up, skip}, 1));
    };
    const Tensor c = reprise::region("join", decode, b, a);
    return (head(c) - in[1]).square().sum();
  }

  /// The same, with checkpoint() around the inner block.
  Tensor checkpointed_loss(const Tensors& in) {
    const Tensor a = reprise::checkpoint(outer, in[0]);
    const Tensor b = reprise::checkpoint(inner, torch::max_pool2d(a, 2));
    const Tensor up = torch::upsample_nearest2d(b, {a.size(2), a.size(3)});
    const Tensor c = join(torch::cat({up, a}, 1));
    return (head(c) - in[1]).square().sum();
  }

  Block outer{3, 16}, inner{16, 32}, join{48, 16};
  torch::nn::Conv2d head{torch::nn::Conv2dOptions(16, 1, 1)};
};
TORCH_MODULE(Net);

Net make_net() {
  torch::manual_seed(1);
  return Net();
}

torch::optim::AdamW make_adamw(const std::vector<Tensor>& parameters) {
  return torch::optim::AdamW(parameters, torch::optim::AdamWOptions(1e-3));
}

/// Trains with LibTorch alone.
void train_plainly(Net& net, const Tensors& batch, int64_t micro_batch) {
  auto optimizer = make_adamw(net->parameters());
  for (int update = 0; update < kUpdates; ++update) {
    for (const Tensors& micro : reprise::split(batch, micro_batch)) {
      const Tensor loss = net->loss(micro);
      loss.backward(torch::full_like(loss, 1.0 / kSamples));
    }
    optimizer.step();
    optimizer.zero_grad();
  }
}

/// Trains with checkpoint() and an Accumulator.
void train_by_hand(Net& net, const Tensors& batch, int64_t micro_batch) {
  auto optimizer = make_adamw(net->parameters());
  reprise::Accumulator accumulator(net->parameters());
  for (int update = 0; update < kUpdates; ++update) {
    accumulator.begin(kSamples);
    for (const Tensors& micro : reprise::split(batch, micro_batch)) {
      accumulator.backward(net->checkpointed_loss(micro),
                           static_cast<double>(micro[0].size(0)));
    }
    accumulator.update(optimizer);
  }
}

/// Trains by a plan.
double train_planned(const reprise::Model& model, const reprise::Plan& plan,
                     const Tensors& batch) {
  auto optimizer = make_adamw(model.root->parameters());
  reprise::PlannedStep step(model, plan);
  double loss = 0;
  for (int update = 0; update < kUpdates; ++update) {
    step.begin(kSamples);
    for (const Tensors& micro : reprise::split(batch, plan.micro_batch)) {
      step.add(micro, static_cast<double>(micro[0].size(0)));
    }
    loss = step.update(optimizer);
  }
  return loss;
}

bool same_bits(const Net& a, const Net& b) {
  const auto left = a->parameters(), right = b->parameters();
  for (size_t i = 0; i < left.size(); ++i) {
    if (std::memcmp(left[i].data_ptr(), right[i].data_ptr(),
                    left[i].nbytes()) != 0) {
      return false;
    }
  }
  return true;
}

template <class Train>
int64_t peak_of(Train&& train) {
  const reprise::MemoryMeter meter;
  train();
  return meter.peak_bytes();
}

}  // namespace

int main() {
  reprise::count_cpu_memory();
  torch::manual_seed(2);
  const Tensors batch = {torch::randn({kSamples, 3, 32, 32}),
                         torch::randn({kSamples, 1, 32, 32})};

  // The whole forward is one stage. Its variants recompute more and more regions.
  Net net = make_net();
  reprise::Model model{
      .name = "net",
      .root = net.ptr(),
      .chain = reprise::Chain({reprise::Stage(
          "net",
          [net](const Tensors& in) mutable { return Tensors{net->loss(in)}; },
          {net.ptr()})})};
  model.chain = reprise::with_region_variants(model.chain, batch);

  reprise::PlanRequest request;
  request.global_batch = kSamples;
  request.micro_batch = 16;  // so that all loops below add in the same order
  request.strategy = "none";
  reprise::ModelPlanOptions options;
  options.optimizer = [](const reprise::NamedTensors& parameters) {
    return reprise::make_optimizer({.name = "adamw"}, parameters);
  };
  const reprise::Batch sample{.tensors = batch, .samples = kSamples};
  const auto plain = reprise::plan_model(model, sample, request, options).plan;
  request.strategy = "";
  request.memory = plain.peak_bytes * 9 / 10;
  const reprise::PlanResult result =
      reprise::plan_model(model, sample, request, options);
  if (!result.feasible) {
    std::cout << "no plan fits; the smallest needs "
              << reprise::format_bytes(result.smallest_bytes)
              << ", a plain loop " << reprise::format_bytes(plain.peak_bytes)
              << '\n';
    return 1;
  }
  const reprise::Plan& plan = result.plan;
  std::cout << "plan: " << describe(plan) << '\n';

  double loss = 0;
  Net reference = make_net();
  const int64_t plain_peak =
      peak_of([&] { train_plainly(reference, batch, plan.micro_batch); });
  const int64_t planned_peak =
      peak_of([&] { loss = train_planned(model, plan, batch); });
  Net by_hand = make_net();
  train_by_hand(by_hand, batch, plan.micro_batch);

  const bool equal = same_bits(net, reference) && same_bits(by_hand, reference);
  const bool fits = planned_peak <= request.memory;
  std::cout << "loss " << loss << "\npeak "
            << reprise::format_bytes(planned_peak) << " within "
            << reprise::format_bytes(request.memory)
            << (fits ? ": yes" : ": no") << "; without a plan "
            << reprise::format_bytes(plain_peak)
            << "\nweights equal: " << (equal ? "yes" : "no") << '\n';
  return equal && fits && planned_peak < plain_peak ? 0 : 1;
}
