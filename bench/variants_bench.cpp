// Memory and time of the variants of a model's stages, and their effect on plans: the
// minimum memory of a schedule, and the shortest time within shares of the peak without
// recomputation, with and without the variants.
#include "options.h"

#include <reprise/base/bytes.h>
#include <reprise/models/model.h>
#include <reprise/plan/solver.h>
#include <reprise/recompute/stage_costs.h>
#include <reprise/recompute/strategy.h>
#include <reprise/version.h>

#include <fmt/format.h>
#include <torch/types.h>

#include <iostream>
#include <set>

namespace {

using reprise::ChainCosts;
using reprise::format_bytes;
using reprise::StageCosts;

struct Settings {
  std::string model = "gpt2";
  std::string device = "cpu";
  int64_t batch = 1;
  int repeats = 3;
  std::vector<int> shares = {20, 50, 80};
  reprise::ModelOptions options;
};

/// Bytes that the graph of a run holds, without the input of the stage.
int64_t held_bytes(const StageCosts& stage, const reprise::KeptRunCosts& run) {
  int64_t bytes = run.saved_bytes;
  for (const int i : run.saved_outputs) {
    bytes += stage.outputs.at(static_cast<size_t>(i)).bytes;
  }
  return bytes;
}

std::string run_text(const StageCosts& stage,
                     const reprise::KeptRunCosts& run) {
  return fmt::format("{:>10}{:>8.1f} +{:>8.1f} ms",
                     format_bytes(held_bytes(stage, run)), run.forward_ms,
                     run.backward_ms);
}

/// Prints one line per kind of stage: equal blocks differ by noise only.
void print_stages(const reprise::Chain& chain, const ChainCosts& figures) {
  fmt::print("{:<24}{:<32}{}\n", "stage", "plain", "variants");
  std::set<std::string> seen;
  for (int i = 0; i < chain.size(); ++i) {
    const StageCosts& stage = figures.stages[static_cast<size_t>(i)];
    const std::string kind =
        chain[i].kind().empty() ? chain[i].name() : chain[i].kind();
    if (stage.variants.empty() || !seen.insert(kind).second) continue;
    std::string line =
        fmt::format("{:<24}{:<32}", chain[i].name(), run_text(stage, stage));
    for (const auto& variant : stage.variants) {
      line += run_text(stage, variant) + "   ";
    }
    fmt::print("{}\n", line);
  }
}

std::string time_text(const reprise::Solver& solver, int64_t bytes) {
  const auto solution = solver.solve(bytes);
  return solution ? fmt::format("{:.0f} ms", solution->simulation.time_ms)
                  : "does not fit";
}

void print_plans(const ChainCosts& figures, const std::vector<int>& shares) {
  ChainCosts plain = figures;
  for (StageCosts& stage : plain.stages) stage.variants.clear();
  const auto none = reprise::simulate(
      reprise::make_schedule("none", static_cast<int>(figures.stages.size())),
      figures);
  const reprise::Solver without(plain);
  const reprise::Solver with(figures);
  fmt::print("\nnone: {}, {:.0f} ms\n{:<28}{:>16}{:>16}\n",
             format_bytes(none.peak_bytes), none.time_ms, "",
             "without variants", "with");
  fmt::print("{:<28}{:>16}{:>16}\n", "minimum memory of a plan",
             format_bytes(without.smallest_bytes()),
             format_bytes(with.smallest_bytes()));
  for (const int share : shares) {
    const int64_t bytes = none.peak_bytes * share / 100;
    fmt::print("{:<28}{:>16}{:>16}\n",
               fmt::format("time within {} % of none", share),
               time_text(without, bytes), time_text(with, bytes));
  }
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  reprise::bench::Options options(
      "Memory and time of the variants of stages, and their effect on plans");
  options.add("--model", &settings.model, "Name of the model")
      .add_positive("--batch", &settings.batch, "Samples per micro-batch")
      .add("--image-size", &settings.options.image_size,
           "Side of the images in pixels; 0: the default of the model")
      .add("--seq", &settings.options.seq,
           "Tokens per sequence; 0: the default of the model")
      .add("--depth", &settings.options.depth,
           "Blocks; 0: the default of the model")
      .add("--width", &settings.options.width,
           "Width; 0: the default of the model")
      .add("--vocab", &settings.options.vocab,
           "Tokens; 0: the default of the model")
      .add_positive("--repeats", &settings.repeats, "Timed runs per stage")
      .add_positive("--shares", &settings.shares,
                    "Budgets in percent of the peak without recomputation")
      .add_device(&settings.device);
  options.parse(argc, argv);

  torch::manual_seed(0);
  const auto device = reprise::bench::device_named(settings.device);
  const auto model = reprise::make_model(settings.model, settings.options);
  model.root->to(device);
  model.root->train();
  const reprise::Tensors inputs =
      reprise::random_batch(model.task, model.options, settings.batch, device);
  const ChainCosts figures =
      reprise::measure_stage_costs(model.chain, inputs, settings.repeats);
  fmt::print("{}, {} samples, {}, LibTorch {}\n", settings.model,
             settings.batch, settings.device, reprise::libtorch_version());
  print_stages(model.chain, figures);
  print_plans(figures, settings.shares);
  return 0;
}
