// A generative adversarial network: two models, two optimizers, alternate updates, with
// gradient accumulation and recomputation in both. Uses reprise::core only:
//
//   1. Each update has a chain: the discriminator alone, and the generator followed by the
//      discriminator, whose parameters are frozen meanwhile.
//   2. Solver finds the fastest schedule of each chain for a memory budget.
//   3. Each model has an Accumulator. Only one window is open at a time, because the
//      generator's loss goes through the discriminator.
//
// Trains the same network from the same seed as plain code, and checks that the weights are
// equal to the last bit and that the peak is lower.
#include <reprise/core.h>

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

using reprise::Chain;
using reprise::Stage;
using reprise::Tensors;
using torch::Tensor;

constexpr int64_t kNoise = 32;
constexpr int64_t kImage = 256;  // values of an image
constexpr int64_t kWidth = 64;
constexpr int kBlocks = 8;
constexpr int64_t kSamples = 2048;  // per update
constexpr int64_t kMicroBatch = 1024;
constexpr int kUpdates = 3;

/// x + W₂ gelu(W₁ norm(x)), with dropout.
struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
    register_module("dropout", dropout);
  }
  Tensor forward(const Tensor& x) {
    return x + dropout(down(torch::gelu(up(norm(x)))));
  }
  torch::nn::BatchNorm1d norm{kWidth};
  torch::nn::Linear up{kWidth, 4 * kWidth};
  torch::nn::Linear down{4 * kWidth, kWidth};
  torch::nn::Dropout dropout{0.1};
};
TORCH_MODULE(Block);

/// Blocks between two linear layers. Both models are of this form.
struct NetImpl : torch::nn::Module {
  NetImpl(std::string prefix, int64_t in, int64_t out)
      : name(std::move(prefix)), first(in, kWidth), last(kWidth, out) {
    register_module("first", first);
    for (int i = 0; i < kBlocks; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block()));
    }
    register_module("last", last);
  }

  /// Stages that change the first tensor and pass the others on.
  std::vector<Stage> stages() const {
    std::vector<Stage> list = {
        reprise::make_stage(name + ".first", first).on_first()};
    for (size_t i = 0; i < blocks.size(); ++i) {
      list.push_back(
          reprise::make_stage(name + ".block" + std::to_string(i), blocks[i])
              .of_kind("block")
              .on_first());
    }
    list.push_back(reprise::make_stage(name + ".last", last).on_first());
    return list;
  }

  std::string name;
  torch::nn::Linear first, last;
  std::vector<Block> blocks;
};
TORCH_MODULE(Net);

/// Sum over samples of softplus(-label · score), for labels of +1 (real) and -1.
Stage loss_stage() {
  return reprise::make_stage(
      "loss", [](const Tensor& scores, const Tensor& labels) {
        return torch::softplus(-labels * scores.squeeze(1)).sum();
      });
}

Tensor labels(int64_t count, double value) {
  return torch::full({count}, value);
}

/// The two models with their chains and optimizers.
class Gan {
 public:
  Gan()
      : generator_("generator", kNoise, kImage),
        discriminator_("discriminator", kImage, 1),
        generate_(generator_->stages()),
        judge_(join(discriminator_->stages(), {loss_stage()})),
        deceive_(join(join(generator_->stages(), discriminator_->stages()),
                      {loss_stage()})),
        generator_adam_(generator_->parameters(), 1e-3),
        discriminator_adam_(discriminator_->parameters(), 1e-3),
        generator_window_(generator_->parameters()),
        discriminator_window_(discriminator_->parameters()) {}

  /// Runs both chains by the fastest schedules whose activations need at most `share` of
  /// what they need without recomputation. Returns false if there is none.
  bool plan(double share) {
    judge_schedule_ = solve(
        judge_,
        {torch::randn({2 * kMicroBatch, kImage}), labels(2 * kMicroBatch, 1)},
        share);
    freeze(true);
    deceive_schedule_ = solve(
        deceive_, {torch::randn({kMicroBatch, kNoise}), labels(kMicroBatch, 1)},
        share);
    freeze(false);
    return judge_schedule_ && deceive_schedule_;
  }

  void update(const Tensor& images) {
    update_discriminator(images);
    update_generator();
  }

  std::vector<Tensor> state() const {
    std::vector<Tensor> list;
    for (const Net& net : {generator_, discriminator_}) {
      for (const auto& p : net->parameters()) list.push_back(p.detach());
      for (const auto& b : net->buffers()) list.push_back(b);
    }
    return list;
  }

 private:
  static std::vector<Stage> join(std::vector<Stage> a,
                                 const std::vector<Stage>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  }

  static std::optional<reprise::Schedule> solve(const Chain& chain,
                                                const Tensors& inputs,
                                                double share) {
    const auto costs = reprise::measure_stage_costs(chain, inputs, 2);
    const auto none =
        reprise::simulate(reprise::make_schedule("none", chain.size()), costs);
    const reprise::Solver solver(costs);
    const auto solution = solver.solve(
        static_cast<int64_t>(share * static_cast<double>(none.peak_bytes)));
    if (!solution) return std::nullopt;
    return solution->schedule;
  }

  /// The loss as part of the autograd graph: by a schedule, or as plain code.
  static Tensor run(const Chain& chain,
                    const std::optional<reprise::Schedule>& schedule,
                    Tensors inputs) {
    if (schedule) return chain.forward(inputs, *schedule)[0];
    for (int i = 0; i < chain.size(); ++i) inputs = chain[i](inputs);
    return inputs[0];
  }

  void freeze(bool frozen) {
    for (auto& p : discriminator_->parameters()) p.set_requires_grad(!frozen);
  }

  void update_discriminator(const Tensor& images) {
    discriminator_window_.begin(2 * kSamples);
    for (const Tensor& real : images.split(kMicroBatch)) {
      const int64_t n = real.size(0);
      Tensor fake;
      {
        const torch::NoGradGuard no_grad;
        fake = run(generate_, std::nullopt, {torch::randn({n, kNoise})});
      }
      const Tensor loss = run(judge_, judge_schedule_,
                              {torch::cat({real, fake}),
                               torch::cat({labels(n, 1), labels(n, -1)})});
      discriminator_window_.backward(loss, 2.0 * static_cast<double>(n));
    }
    discriminator_window_.update(discriminator_adam_);
  }

  void update_generator() {
    freeze(true);
    generator_window_.begin(kSamples);
    for (int64_t done = 0; done < kSamples; done += kMicroBatch) {
      const Tensor loss =
          run(deceive_, deceive_schedule_,
              {torch::randn({kMicroBatch, kNoise}), labels(kMicroBatch, 1)});
      generator_window_.backward(loss, kMicroBatch);
    }
    generator_window_.update(generator_adam_);
    freeze(false);
  }

  Net generator_, discriminator_;
  Chain generate_, judge_, deceive_;
  torch::optim::Adam generator_adam_, discriminator_adam_;
  reprise::Accumulator generator_window_, discriminator_window_;
  std::optional<reprise::Schedule> judge_schedule_, deceive_schedule_;
};

struct Result {
  std::vector<Tensor> state;
  int64_t peak_bytes = 0;
};

/// Trains on images that are smooth curves. `share` of 0: without recomputation.
std::optional<Result> train(double share) {
  torch::manual_seed(1);
  Gan gan;
  if (share > 0 && !gan.plan(share)) return std::nullopt;
  torch::manual_seed(2);
  const reprise::MemoryMeter meter;
  for (int update = 0; update < kUpdates; ++update) {
    const Tensor phase = torch::rand({kSamples, 1}) * 6;
    gan.update(torch::sin(torch::linspace(0, 12, kImage) + phase));
  }
  return Result{gan.state(), meter.peak_bytes()};
}

}  // namespace

int main() {
  reprise::count_cpu_memory();
  const auto plain = train(0);
  const auto planned = train(0.5);
  if (!planned) {
    std::cout << "no schedule fits\n";
    return 1;
  }
  bool equal = true;
  for (size_t i = 0; i < plain->state.size(); ++i) {
    const Tensor &a = plain->state[i], &b = planned->state[i];
    equal &= std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0;
  }
  const bool lower = planned->peak_bytes < plain->peak_bytes * 3 / 4;
  std::cout << "peak " << reprise::format_bytes(planned->peak_bytes)
            << ", without recomputation "
            << reprise::format_bytes(plain->peak_bytes)
            << "\nweights and statistics equal: " << (equal ? "yes" : "no")
            << '\n';
  return equal && lower ? 0 : 1;
}
