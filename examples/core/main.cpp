// Trains a user-defined torch::nn::Module within a memory budget. Uses
// reprise::core only:
//
//   1. checkpoint() recomputes the activations of a block inside an ordinary forward.
//   2. Chain and Solver run the model with the fastest schedule that fits the budget.
//   3. Accumulator adds up the gradients of micro-batches of different sizes.
//   4. linear_cross_entropy() computes the loss without storing all logits.
#include <reprise/core.h>

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

namespace {

using torch::Tensor;

constexpr int64_t kVocabulary = 512;
constexpr int64_t kWidth = 64;
constexpr int64_t kLength = 128;  // tokens per sample
constexpr int kBlocks = 8;

/// x + dropout(W₂ gelu(W₁ norm(x))).
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

  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({kWidth})};
  torch::nn::Linear up{kWidth, 4 * kWidth};
  torch::nn::Linear down{4 * kWidth, kWidth};
  torch::nn::Dropout dropout{0.1};
};
TORCH_MODULE(Block);

/// Predicts `targets` (N, T) from `tokens` (N, T); returns the sum of the
/// losses.
struct LanguageModelImpl : torch::nn::Module {
  LanguageModelImpl() {
    register_module("embedding", embedding);
    for (int i = 0; i < kBlocks; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block()));
    }
    register_module("norm", norm);
    register_module("head", head);
  }

  /// If `recompute` is true, the activations of the blocks are recomputed in
  /// the backward.
  Tensor forward(const Tensor& tokens, const Tensor& targets, bool recompute) {
    Tensor x = embedding(tokens);
    for (auto& block : blocks) {
      x = recompute ? reprise::checkpoint(block, x) : block(x);
    }
    return loss(x, targets);
  }

  Tensor loss(const Tensor& x, const Tensor& targets) {
    return reprise::ops::linear_cross_entropy(norm(x).flatten(0, 1),
                                              head->weight, head->bias,
                                              targets.flatten())
        .loss;
  }

  /// The model as a chain on {x, targets}. The targets are passed to the last
  /// stage. The stages share the modules of this model.
  reprise::Chain chain() {
    std::vector<reprise::Stage> stages;
    stages.push_back(reprise::make_stage("embedding", embedding).on_first());
    for (int i = 0; i < kBlocks; ++i) {
      stages.push_back(reprise::make_stage("block" + std::to_string(i),
                                           blocks[static_cast<size_t>(i)])
                           .on_first());
    }
    stages.push_back(
        reprise::make_stage("loss",
                            [this](const Tensor& x, const Tensor& targets) {
                              return loss(x, targets);
                            },
                            {norm.ptr(), head.ptr()}));
    return reprise::Chain(std::move(stages));
  }

  torch::nn::Embedding embedding{kVocabulary, kWidth};
  std::vector<Block> blocks;
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({kWidth})};
  torch::nn::Linear head{kWidth, kVocabulary};
};
TORCH_MODULE(LanguageModel);

struct MicroBatch {
  Tensor tokens, targets;
};

/// Sequences that count upwards from a random token.
MicroBatch draw(int64_t samples) {
  const Tensor first = torch::randint(kVocabulary, {samples, 1}, torch::kLong);
  const Tensor tokens = (first + torch::arange(kLength + 1)) % kVocabulary;
  return {tokens.slice(1, 0, kLength).contiguous(),
          tokens.slice(1, 1).contiguous()};
}

/// Returns the loss and all gradients, and clears the gradients of the model.
std::vector<Tensor> gradients(LanguageModel& model, const MicroBatch& batch,
                              bool recompute) {
  torch::manual_seed(1);  // the same dropout in both cases
  const reprise::MemoryMeter meter;
  const Tensor loss = model->forward(batch.tokens, batch.targets, recompute);
  loss.backward();
  std::cout << (recompute ? "checkpoint(): " : "plain: ") << "peak "
            << reprise::format_bytes(meter.peak_increase_bytes()) << "\n";
  std::vector<Tensor> list = {loss.detach()};
  for (auto& parameter : model->parameters()) {
    list.push_back(parameter.grad());
    parameter.mutable_grad().reset();
  }
  return list;
}

bool equal(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!torch::equal(a[i], b[i])) return false;
  }
  return true;
}

/// Returns the fastest schedule for a budget halfway between the smallest
/// memory of any schedule and the memory without recomputation.
reprise::Schedule plan(const reprise::Chain& chain, const MicroBatch& batch) {
  const reprise::Solver solver(
      reprise::measure_stage_costs(chain, {batch.tokens, batch.targets}));
  const int64_t budget = (solver.smallest_bytes() + solver.largest_bytes()) / 2;
  const auto solution = solver.solve(budget);
  TORCH_CHECK(solution, "no schedule fits ", reprise::format_bytes(budget));
  std::cout << "schedule: budget " << reprise::format_bytes(budget)
            << ", predicted peak "
            << reprise::format_bytes(solution->simulation.peak_bytes)
            << ", without recomputation "
            << reprise::format_bytes(solver.largest_bytes()) << "\n"
            << "  " << solution->schedule.to_text() << "\n";
  return solution->schedule;
}

/// Runs one update with micro-batches of 4, 4 and 2 samples and returns the
/// mean loss per token. Raises `peak_bytes` to the peak of the micro-batches
/// after the first one, which allocates the gradients of the parameters.
double train_window(const reprise::Chain& chain,
                    const reprise::Schedule& schedule,
                    reprise::Accumulator& accumulator,
                    torch::optim::Optimizer& optimizer, int64_t& peak_bytes) {
  const std::vector<MicroBatch> window = {draw(4), draw(4), draw(2)};
  int64_t tokens = 0;
  for (const auto& micro : window) tokens += micro.targets.numel();
  double sum = 0;
  accumulator.begin(static_cast<double>(tokens));
  for (const auto& micro : window) {
    const reprise::MemoryMeter meter;
    const Tensor loss =
        chain.forward({micro.tokens, micro.targets}, schedule)[0];
    accumulator.backward(loss, static_cast<double>(micro.targets.numel()));
    if (sum > 0) peak_bytes = std::max(peak_bytes, meter.peak_increase_bytes());
    sum += loss.item<double>();
  }
  accumulator.clip(1.0);
  accumulator.update(optimizer);
  return sum / static_cast<double>(tokens);
}

}  // namespace

int main() {
  torch::manual_seed(0);
  LanguageModel model;
  const MicroBatch batch = draw(4);

  const auto plain = gradients(model, batch, /*recompute=*/false);
  const auto recomputed = gradients(model, batch, /*recompute=*/true);
  const bool same = equal(plain, recomputed);
  std::cout << "gradients equal: " << (same ? "yes" : "no") << "\n";

  const reprise::Chain chain = model->chain();
  const reprise::Schedule schedule = plan(chain, batch);

  reprise::Accumulator accumulator(model->parameters());
  torch::optim::AdamW optimizer(model->parameters(),
                                torch::optim::AdamWOptions(3e-3));
  int64_t peak_bytes = 0;
  std::vector<double> losses;
  for (int i = 0; i < 60; ++i) {
    losses.push_back(
        train_window(chain, schedule, accumulator, optimizer, peak_bytes));
  }
  std::cout << "measured peak " << reprise::format_bytes(peak_bytes) << "\n"
            << "loss per token: " << losses.front() << " to " << losses.back()
            << "\n";
  return same && losses.back() < losses.front() / 2 ? 0 : 1;
}
