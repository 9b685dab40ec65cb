#pragma once

#include <reprise/recompute/simulate.h>

#include <algorithm>
#include <random>

namespace reprise::testing {

struct RandomFigures {
  int stages = 4;
  int max_bytes = 4;     ///< maximum of each size
  int max_ms = 5;        ///< maximum of each time; times are whole numbers
  bool variants = true;  ///< whether some stages have variants
  /// Whether boundaries have several tensors, some passed through stages.
  bool passed_through = false;
};

/// Returns random costs of a chain.
class RandomChain {
 public:
  RandomChain(std::mt19937& random, const RandomFigures& wanted)
      : random_(random), wanted_(wanted) {}

  ChainCosts make() {
    ChainCosts chain;
    chain.input_bytes = {bytes()};
    if (wanted_.passed_through && coin()) chain.input_bytes.push_back(bytes());
    auto inputs = static_cast<int>(chain.input_bytes.size());
    for (int i = 0; i < wanted_.stages; ++i) {
      chain.stages.push_back(stage(inputs));
      inputs = static_cast<int>(chain.stages.back().outputs.size());
    }
    chain.output_gradient_bytes = bytes();
    return chain;
  }

 private:
  int up_to(int most) {
    return std::uniform_int_distribution<int>(0, most)(random_);
  }
  bool coin() { return up_to(1) == 1; }
  int64_t bytes() { return up_to(wanted_.max_bytes); }
  int64_t rarely_bytes() { return up_to(2) == 0 ? bytes() : 0; }

  void fill(KeptRunCosts& run, int inputs, int outputs) {
    for (int i = 0; i < inputs; ++i) {
      if (coin()) run.saved_inputs.push_back(i);
    }
    for (int i = 0; i < outputs; ++i) {
      if (coin()) run.saved_outputs.push_back(i);
    }
    run.saved_bytes = bytes();
    run.keep_extra_bytes = rarely_bytes();
    run.backward_extra_bytes = rarely_bytes();
    run.forward_ms = 1 + up_to(wanted_.max_ms - 1);
    run.backward_ms = up_to(wanted_.max_ms);
  }

  StageCosts stage(int inputs) {
    StageCosts stage;
    stage.outputs = {{bytes(), -1}};
    for (int i = 0; wanted_.passed_through && i < inputs; ++i) {
      if (up_to(2) > 0 && stage.outputs.size() < 5) {
        stage.outputs.push_back({0, i});
      }
    }
    if (wanted_.passed_through && up_to(2) == 0) {
      stage.outputs.push_back({bytes(), -1});
    }
    const auto outputs = static_cast<int>(stage.outputs.size());
    fill(stage, inputs, outputs);
    stage.input_gradient_bytes = bytes();
    stage.drop_extra_bytes = rarely_bytes();
    for (int v = up_to(4) - 2; wanted_.variants && v > 0; --v) {
      fill(stage.variants.emplace_back(), inputs, outputs);
    }
    fill_unused(stage);
    return stage;
  }

  /// Less than a second run of the stage takes.
  void fill_unused(StageCosts& stage) {
    const auto ms = [](const KeptRunCosts& run) {
      return run.forward_ms + run.backward_ms;
    };
    double fastest = ms(stage);
    for (const auto& variant : stage.variants) {
      fastest = std::min(fastest, ms(variant));
    }
    const double forward_ms = stage.forward_ms;
    const auto set = [&](KeptRunCosts& run) {
      if (coin()) return;
      const double least =
          std::min(run.forward_ms, ms(run) - fastest + forward_ms);
      run.unused_output_ms = up_to(std::max(0, static_cast<int>(least) - 1));
    };
    set(stage);
    for (auto& variant : stage.variants) set(variant);
  }

  std::mt19937& random_;
  RandomFigures wanted_;
};

inline ChainCosts random_costs(std::mt19937& random,
                               const RandomFigures& wanted) {
  return RandomChain(random, wanted).make();
}

}  // namespace reprise::testing
