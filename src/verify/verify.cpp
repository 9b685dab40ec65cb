#include "compat/rng.h"

#include <reprise/recompute/check_chain.h>
#include <reprise/recompute/execution.h>
#include <reprise/recompute/simulate.h>
#include <reprise/recompute/stage_costs.h>
#include <reprise/verify/verify.h>

#include <ATen/Context.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace reprise {
namespace {

/// During its lifetime, cuDNN uses deterministic algorithms and does not
/// benchmark, so that runs can be compared bit by bit. Has no effect on the
/// CPU.
class DeterministicCudnn {
 public:
  DeterministicCudnn() {
    at::globalContext().setDeterministicCuDNN(true);
    at::globalContext().setBenchmarkCuDNN(false);
  }
  ~DeterministicCudnn() {
    at::globalContext().setDeterministicCuDNN(deterministic_);
    at::globalContext().setBenchmarkCuDNN(benchmark_);
  }
  DeterministicCudnn(const DeterministicCudnn&) = delete;
  DeterministicCudnn& operator=(const DeterministicCudnn&) = delete;

 private:
  bool deterministic_ = at::globalContext().deterministicCuDNN();
  bool benchmark_ = at::globalContext().benchmarkCuDNN();
};

struct NamedTensor {
  std::string name;
  torch::Tensor value;
};

/// All results of training, in the order of VerifyReport::rows.
struct Outcome {
  std::vector<NamedTensor> losses;
  std::vector<NamedTensor> gradients;
  std::vector<NamedTensor> buffers;
  std::vector<NamedTensor> rng;
  std::vector<NamedTensor> parameters;
};

struct RunCounter final : ExecutionObserver {
  explicit RunCounter(int stages) : runs(static_cast<size_t>(stages)) {}
  void before(const Op& op) override {
    if (is_forward(op.kind)) ++runs[static_cast<size_t>(op.stage)];
  }
  std::vector<int> runs;
};

torch::Tensor copy_of(const torch::Tensor& tensor) {
  return tensor.detach().clone();
}

/// Trains with `step`, which runs one forward and backward pass and returns the
/// sum of the losses first.
template <class Step>
Outcome train(const Chain& chain, const Tensors& inputs, int updates,
              Step&& step) {
  Outcome outcome;
  const auto parameters = chain.parameters();
  torch::optim::SGD optimizer(parameters,
                              torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int u = 0; u < updates; ++u) {
    const std::string prefix = "update " + std::to_string(u) + ", ";
    const Tensors results = step();
    outcome.losses.push_back({prefix + "loss", copy_of(results.at(0))});
    for (size_t i = 0; i < parameters.size(); ++i) {
      const torch::Tensor gradient = parameters[i].grad();
      outcome.gradients.push_back(
          {prefix + "gradient " + std::to_string(i),
           gradient.defined() ? copy_of(gradient) : torch::Tensor()});
    }
    optimizer.step();
    for (auto parameter : parameters) parameter.mutable_grad().reset();
    size_t b = 0;
    for (const auto& buffer : chain.buffers()) {
      outcome.buffers.push_back(
          {prefix + "buffer " + std::to_string(b++), copy_of(buffer)});
    }
    size_t g = 0;
    for (auto& state : compat::RngState::capture(inputs).states()) {
      outcome.rng.push_back(
          {prefix + "generator " + std::to_string(g++), std::move(state)});
    }
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    outcome.parameters.push_back(
        {"parameter " + std::to_string(i), copy_of(parameters[i])});
  }
  return outcome;
}

/// Returns d(loss sum / count) / d(loss sum). The count is constant for a
/// batch.
torch::Tensor loss_weight(const Tensors& results, int64_t count) {
  TORCH_CHECK(results.size() == 1 || results.size() == 2,
              "[verify] expected the last stage to return the loss sum and "
              "optionally its count, got ",
              results.size(), " tensors");
  const torch::Tensor one = torch::ones_like(results[0]);
  return results.size() == 2 ? one / results[1].detach()
                             : one / static_cast<double>(count);
}

bool same_bits(const torch::Tensor& a, const torch::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) {
    return false;
  }
  const torch::Tensor x = a.cpu().contiguous();
  const torch::Tensor y = b.cpu().contiguous();
  return x.numel() == 0 ||
         std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0;
}

double relative_difference(const torch::Tensor& a, const torch::Tensor& b) {
  if (a.sizes() != b.sizes()) return INFINITY;
  if (a.numel() == 0) return 0;
  const torch::Tensor x = a.cpu().to(torch::kDouble);
  const double difference =
      (x - b.cpu().to(torch::kDouble)).abs().max().item<double>();
  const double scale = x.abs().max().item<double>();
  if (difference == 0) return 0;
  // A NaN on one side only must not pass the comparison.
  return std::isfinite(difference) && scale > 0 ? difference / scale : INFINITY;
}

VerifyRow compare(VerifiedKind what, const std::vector<NamedTensor>& expected,
                  const std::vector<NamedTensor>& got, double tolerance) {
  VerifyRow row;
  row.what = what;
  row.same = expected.size() == got.size();
  for (size_t i = 0; i < std::min(expected.size(), got.size()); ++i) {
    const torch::Tensor& a = expected[i].value;
    const torch::Tensor& b = got[i].value;
    ++row.tensors;
    if (a.defined() != b.defined()) {
      ++row.different;
      row.max_relative = INFINITY;
      row.worst = expected[i].name;
      row.same = false;
    }
    if (!a.defined() || !b.defined() || same_bits(a, b)) continue;
    ++row.different;
    const double relative = relative_difference(a, b);
    if (relative >= row.max_relative) {
      row.max_relative = relative;
      row.worst = expected[i].name;
    }
    if (tolerance == 0 || relative > tolerance) row.same = false;
  }
  return row;
}

/// Restores the state of a chain: its parameters and buffers with reset(), these
/// and the gradients and random generators when it is destroyed.
class ChainState {
 public:
  ChainState(const Chain& chain, const Tensors& inputs)
      : rng_(compat::RngState::capture(inputs)) {
    const torch::NoGradGuard no_grad;
    for (const auto& list : {chain.parameters(), chain.buffers()}) {
      for (const auto& tensor : list) {
        // In host memory, because a copy may not fit on the device.
        values_.emplace_back(
            tensor, tensor.is_cuda() ? tensor.detach().cpu() : copy_of(tensor));
      }
    }
    for (auto& parameter : chain.parameters()) {
      gradients_.emplace_back(parameter,
                              std::exchange(parameter.mutable_grad(), {}));
    }
  }
  ~ChainState() {
    reset();
    for (auto& [parameter, gradient] : gradients_) {
      parameter.mutable_grad() = gradient;
    }
    rng_.restore();
  }
  ChainState(const ChainState&) = delete;
  ChainState& operator=(const ChainState&) = delete;

  void reset() {
    const torch::NoGradGuard no_grad;
    for (auto& [tensor, before] : values_) tensor.detach().copy_(before);
    for (auto& [parameter, gradient] : gradients_) {
      parameter.mutable_grad().reset();
    }
  }

 private:
  using Pair = std::pair<torch::Tensor, torch::Tensor>;
  std::vector<Pair> values_;
  std::vector<Pair> gradients_;
  compat::RngState rng_;
};

using MakeSchedule = std::function<Schedule(int stages)>;

VerifyReport verify_with(const VerifySubject& subject,
                         const MakeSchedule& make_schedule_of,
                         const VerifyOptions& options) {
  const DeterministicCudnn deterministic;
  TORCH_CHECK(options.updates >= 1,
              "[verify] expected at least one update, got ", options.updates);
  const auto seeded = [&](const auto& make, uint64_t salt) {
    torch::manual_seed(options.seed + salt);
    return make();
  };
  const auto& make_reference =
      subject.make_reference ? subject.make_reference : subject.make_chain;
  const Tensors inputs = seeded(subject.make_inputs, 1000);

  const Chain reference = seeded(make_reference, 0);
  torch::manual_seed(options.seed + 1);
  const Outcome expected = train(reference, inputs, options.updates, [&] {
    Tensors current = inputs;
    for (int i = 0; i < reference.size(); ++i) current = reference[i](current);
    current.at(0).backward(loss_weight(current, subject.count));
    return current;
  });

  const Chain chain = seeded(subject.make_chain, 0);
  const Schedule schedule = make_schedule_of(chain.size());
  Tensors state = chain.parameters();
  for (const auto& buffer : chain.buffers()) state.push_back(buffer);
  const KeptMeter meter(state);
  RunCounter counter(chain.size());
  Execution execution(chain, schedule, {.meter = &meter, .observer = &counter});
  torch::manual_seed(options.seed + 1);
  const Outcome got = train(chain, inputs, options.updates, [&] {
    Tensors results = execution.forward(inputs);
    Tensors gradients(results.size());
    gradients[0] = loss_weight(results, subject.count);
    execution.backward(std::move(gradients));
    return results;
  });

  VerifyReport report;
  report.subject = subject.name;
  report.strategy = schedule.name();
  report.rows = {
      compare(VerifiedKind::kLoss, expected.losses, got.losses,
              options.tolerance),
      compare(VerifiedKind::kGradients, expected.gradients, got.gradients,
              options.tolerance),
      compare(VerifiedKind::kBuffers, expected.buffers, got.buffers,
              options.tolerance),
      compare(VerifiedKind::kRng, expected.rng, got.rng, 0),
      compare(VerifiedKind::kParameters, expected.parameters, got.parameters,
              options.tolerance),
  };
  for (const VerifyRow& row : report.rows) report.same &= row.same;

  // After the training, so that it begins with the first run of every stage.
  check_chain(chain, inputs);
  const Simulation simulation =
      simulate(schedule, measure_stage_costs(chain, inputs));
  report.simulated_runs = simulation.runs;
  report.simulated_kept_bytes = simulation.kept_peak_bytes;
  report.kept_peak_bytes = meter.peak_bytes();
  for (const int runs : counter.runs) {
    report.same &= runs % options.updates == 0;
    report.runs.push_back(runs / options.updates);
  }
  report.same &= report.runs == report.simulated_runs;
  return report;
}

VerifyReport verify_in_place(const Chain& chain, const Tensors& inputs,
                             const MakeSchedule& make_schedule_of,
                             const VerifyOptions& options) {
  TORCH_CHECK(!inputs.empty() && inputs[0].defined(),
              "[verify] expected at least one input, got none");
  ChainState state(chain, inputs);
  const VerifySubject subject{
      .name = "chain",
      .make_chain =
          [&] {
            state.reset();
            return chain;
          },
      .make_inputs = [&] { return inputs; },
      .count = inputs[0].dim() > 0 ? inputs[0].size(0) : 1};
  return verify_with(subject, make_schedule_of, options);
}

MakeSchedule schedule_maker(const Strategy& strategy) {
  return [strategy](int stages) { return make_schedule(strategy, stages); };
}

}  // namespace

VerifyReport verify(const VerifySubject& subject, const Strategy& strategy,
                    const VerifyOptions& options) {
  VerifyReport report = verify_with(subject, schedule_maker(strategy), options);
  report.strategy = strategy.to_text();
  return report;
}

VerifyReport verify(const Chain& chain, const Tensors& inputs,
                    const Strategy& strategy, const VerifyOptions& options) {
  VerifyReport report =
      verify_in_place(chain, inputs, schedule_maker(strategy), options);
  report.strategy = strategy.to_text();
  return report;
}

VerifyReport verify(const Chain& chain, const Tensors& inputs,
                    const Schedule& schedule, const VerifyOptions& options) {
  return verify_in_place(
      chain, inputs, [&](int) { return schedule; }, options);
}

std::vector<VerifyReport> verify(const Chain& chain, const Tensors& inputs,
                                 const VerifyOptions& options) {
  constexpr int kSampled = 3;  // stages that sample_strategies() needs
  std::vector<VerifyReport> reports;
  for (const Strategy& strategy : chain.size() < kSampled
                                      ? strategies_for(chain.size())
                                      : sample_strategies()) {
    reports.push_back(verify(chain, inputs, strategy, options));
  }
  return reports;
}

}  // namespace reprise
