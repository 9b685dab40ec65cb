#pragma once

#include "train/runs.h"
#include "train/step/micro_step.h"
#include "train/step/step_graphs.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

/// Trainings and steps for tests of CUDA graphs.
namespace reprise::testing {

inline TrainConfig images() {
  auto config = small("cnn-basic");
  config.model_options.norm = "batch";
  config.model_options.image_size = 28;
  config.random_samples = 22;
  config.clip = 0.5;
  return config;
}

inline TrainConfig tokens() {
  auto config = small("gpt2");
  config.model_options.depth = 2;
  config.model_options.width = 16;
  config.model_options.heads = 2;
  config.model_options.vocab = 11;
  config.model_options.seq = 8;
  config.model_options.dropout = 0.2;
  return config;
}

inline TrainConfig ragged(TrainConfig config) {
  config.batch = 3;
  config.accumulate = 0;
  config.global_batch = 8;  // 3, 3, 2; the last window of an epoch has 3, 3
  config.epochs = 3;
  return config;
}

/// Runs the step again instead of launching a CUDA graph.
class Repeated final : public detail::Recorded {
 public:
  /// `fails` counts down; the capture at which it reaches 0 fails.
  explicit Repeated(int* fails = nullptr) : fails_(fails) {}
  void capture(const std::function<void()>& body) override {
    TORCH_CHECK(fails_ == nullptr || --*fails_ != 0, "cannot be captured");
    body_ = body;
  }
  void replay() override { body_(); }
  int64_t bytes() const override { return 0; }

 private:
  std::function<void()> body_;
  int* fails_;
};

inline detail::MakeRecorded repeated(int* fails = nullptr) {
  return [fails] { return std::make_unique<Repeated>(fails); };
}

/// Checks that a training gives the same results with and without CUDA graphs.
inline void expect_same_with_graph(TrainConfig config, const std::string& what,
                                   int64_t captures) {
  config.graph = GraphMode::kOff;
  const Ended plain = run(config);
  EXPECT_EQ(plain.result.summary.graph, "off");
  config.graph = GraphMode::kAuto;
  Warnings warnings;
  const Ended graphed = run(config, {}, &warnings);
  const auto& s = graphed.result.summary;
  EXPECT_EQ(s.graph, "on") << what;
  EXPECT_EQ(s.graph_captures, captures) << what;
  EXPECT_GT(s.graph_replays, 0) << what;
  EXPECT_EQ(warnings.count("graph"), 0) << what;
  expect_same(graphed, plain, what);
}

/// A micro-step with CUDA graphs, outside of a training.
struct Stepper {
  Stepper(Chain given, Schedule schedule)
      : chain(std::move(given)),
        execution(chain, std::move(schedule)),
        step(device(), {}, chain.parameters()),
        graphs({.device = device(),
                .parameters = chain.parameters(),
                .warn = [this](const std::string& t) { told.push_back(t); }}) {
    step.set_weight(1);
  }
  /// Returns whether a CUDA graph ran.
  bool run(const Tensors& batch) {
    const auto body = [this](const Tensors& in) { step.run(execution, in); };
    if (graphs.run(batch, body)) return true;
    body(batch);
    return false;
  }
  Chain chain;
  Execution execution;
  detail::MicroStep step;
  std::vector<std::string> told;
  detail::StepGraphs graphs;
};

inline Chain summed(Stage stage) {
  return Chain({std::move(stage), make_stage("sum", [](const torch::Tensor& x) {
                  return x.sum();
                })});
}

}  // namespace reprise::testing
