// Memory, recomputed stages and time of every strategy on a chain of equal stages,
// measured and simulated. Times are relative to "none", measured in alternation.
#include "compat/cuda.h"
#include "options.h"
#include "side_by_side.h"

#include <reprise/base/bytes.h>
#include <reprise/memory/meter.h>
#include <reprise/recompute/execution.h>
#include <reprise/recompute/simulate.h>
#include <reprise/recompute/stage_costs.h>
#include <reprise/recompute/strategy.h>
#include <reprise/version.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <iostream>
#include <utility>

namespace {

using reprise::Chain;
using reprise::Tensors;
using torch::Tensor;

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(int64_t width)
      : linear(register_module("linear", torch::nn::Linear(width, width))) {}
  Tensor forward(const Tensor& x) { return torch::tanh(linear(x)); }
  torch::nn::Linear linear;
};
TORCH_MODULE(Layer);

Chain equal_stages(int count, int64_t width, torch::Device device) {
  torch::nn::Sequential net;
  for (int i = 0; i < count; ++i) {
    net->push_back(Layer(width));
  }
  net->to(device);
  return Chain(net);
}

void step(reprise::Execution& execution, const Tensor& x) {
  const Tensors y = execution.forward({x});
  Tensors gradients(1);
  gradients[0] = torch::ones_like(y[0]);
  execution.backward(std::move(gradients));
  if (x.is_cuda()) reprise::compat::cuda_synchronize(x.device().index());
}

struct Row {
  std::string strategy;
  int runs = 0;
  int64_t kept = 0, kept_simulated = 0;  // bytes
  int64_t peak = 0,
          peak_simulated = 0;   // allocated bytes above the initial level
  reprise::bench::Spread time;  // relative to "none"
};

Row measure(const Chain& chain, const Tensor& x, const std::string& strategy,
            const reprise::ChainCosts& figures, int repeats) {
  const auto schedule = reprise::make_schedule(strategy, chain.size());
  const auto simulated = reprise::simulate(schedule, figures);
  Row row;
  row.strategy = strategy;
  row.runs = schedule.total_runs();
  row.kept_simulated = simulated.kept_peak_bytes;
  row.peak_simulated = simulated.peak_bytes;
  const reprise::KeptMeter kept(chain.parameters());
  {
    reprise::Execution metered(chain, schedule, {.meter = &kept});
    step(metered, x);  // also allocates the gradients of the parameters
    row.kept = kept.peak_bytes();
  }
  reprise::Execution execution(chain, schedule);
  {
    const reprise::MemoryMeter meter(x.device());
    step(execution, x);
    row.peak = meter.peak_increase_bytes();
  }
  reprise::Execution none(chain, reprise::make_schedule("none", chain.size()));
  row.time = reprise::bench::side_by_side([&] { step(none, x); },
                                          [&] { step(execution, x); }, repeats)
                 .ratio;
  return row;
}

nlohmann::json to_json(const Row& row) {
  return {{"recompute", row.strategy},
          {"stage_runs", row.runs},
          {"kept_peak_bytes", row.kept},
          {"kept_peak_simulated_bytes", row.kept_simulated},
          {"peak_bytes", row.peak},
          {"peak_simulated_bytes", row.peak_simulated},
          {"time_ratio", row.time.median},
          {"time_ratio_quartiles", {row.time.low, row.time.high}}};
}

}  // namespace

int main(int argc, char** argv) {
  std::string device_name = "cpu", format = "table";
  int stages = 100, repeats = 9;
  int64_t width = 128, rows = 4096;
  std::vector<std::string> strategies = {
      "none",          "every:2",       "every:4",   "sqrt",       "every:20",
      "checkpoints:4", "checkpoints:9", "all",       "revolve:20", "revolve:12",
      "revolve:8",     "revolve:6",     "revolve:4", "revolve:3"};
  reprise::bench::Options(
      "Memory and time of every strategy on a chain of equal stages")
      .add_device(&device_name)
      .add_positive("--stages", &stages, "Number of stages")
      .add_positive("--width", &width, "Width of a stage")
      .add_positive("--rows", &rows, "Number of rows of the batch")
      .add_positive("--repeats", &repeats, "Number of pairs of runs")
      .add("--recompute", &strategies, "Strategies to measure")
      .add_format(&format)
      .parse(argc, argv);

  reprise::count_cpu_memory();
  const torch::Device device = reprise::bench::device_named(device_name);
  torch::manual_seed(0);
  const Chain chain = equal_stages(stages, width, device);
  const Tensor x = torch::randn({rows, width}, device);
  const auto figures = reprise::measure_stage_costs(chain, {x});

  nlohmann::json list = nlohmann::json::array();
  if (format == "table") {
    fmt::print("LibTorch {}, {}, {} stages, {} pairs\n\n",
               reprise::libtorch_version(), device_name, stages, repeats);
    fmt::print("{:<15}{:>6}{:>12}{:>8}{:>12}{:>12}{:>12}{:>8}{:>16}\n",
               "recompute", "runs", "kept", "", "simulated", "peak",
               "simulated", "time", "quartiles");
  }
  int64_t most = 0;
  for (const std::string& strategy : strategies) {
    const Row row = measure(chain, x, strategy, figures, repeats);
    most = std::max(most, row.kept);
    list.push_back(to_json(row));
    if (format == "json") continue;
    const auto bytes = [](int64_t n) { return reprise::format_bytes(n); };
    fmt::print(
        "{:<15}{:>6}{:>12}{:>7.1f}%{:>12}{:>12}{:>12}{:>8.2f}{:>9.2f} … "
        "{:.2f}\n",
        row.strategy, row.runs, bytes(row.kept),
        100.0 * static_cast<double>(row.kept) / static_cast<double>(most),
        bytes(row.kept_simulated), bytes(row.peak), bytes(row.peak_simulated),
        row.time.median, row.time.low, row.time.high);
    std::fflush(stdout);
  }
  if (format == "json") {
    std::cout << nlohmann::json{{"stages", stages},
                                {"device", device_name},
                                {"libtorch", reprise::libtorch_version()},
                                {"rows", list}}
                     .dump(2)
              << "\n";
  }
  return 0;
}
