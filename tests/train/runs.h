#pragma once

#include "base/file.h"
#include "memory/failure.h"
#include "support.h"
#include "temporary.h"
#include "train/store/run_state.h"

#include <reprise/train/config.h>
#include <reprise/train/trainer.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

/// Small trainings and their results.
namespace reprise::testing {

inline TrainConfig small(const std::string& model = "mlp") {
  TrainConfig config;
  config.model = model;
  config.device = device().str();
  config.data = "random";
  config.random_samples = 22;  // the last window and micro-batch are short
  config.batch = 4;
  config.accumulate = 2;
  config.epochs = 2;
  config.workers = 2;
  config.evaluate = false;
  config.graph = GraphMode::kOff;  // tested by graph_test.cpp
  if (model == "mlp") {
    config.model_options.depth = 2;
    config.model_options.width = 16;
    config.model_options.dropout = 0.2;
  }
  return config;
}

/// A budget that small models fit into on every device. On CUDA, workspaces of libraries
/// alone take more than 64 MiB.
inline int64_t enough_memory() {
  return int64_t{device().is_cuda() ? 256 : 64} << 20;
}

/// Records the warnings of a training.
struct Warnings : TrainListener {
  void warned(const std::string& text) override { list.push_back(text); }
  bool needs_gradients() const override { return false; }
  int count(const std::string& part) const {
    return static_cast<int>(
        std::count_if(list.begin(), list.end(), [&](const auto& text) {
          return text.find(part) != std::string::npos;
        }));
  }
  std::vector<std::string> list;
};

struct Ended {
  TrainResult result;
  NamedTensors tensors;
  std::string metrics;
  TrainConfig config;       ///< from the run directory
  int64_t allocations = 0;  ///< number in the part with the failure
};

/// Selects the allocation that fails: number `after` since run() has read the data for its
/// fingerprint, which is the first that it does, in part `part` of a training. A negative one
/// fails while the data is read.
struct Failing {
  size_t part = 0;
  int64_t after = std::numeric_limits<int64_t>::max();  ///< none
};

using MakePlanner = std::function<std::unique_ptr<BudgetPlanner>()>;

/// The allocations of a fingerprint of the data.
inline int64_t allocations_of_fingerprint(const TrainInputs& inputs) {
  const AllocationFailure none(std::numeric_limits<int64_t>::max());
  (void)inputs.data.train->fingerprint();
  return none.counted();
}

/// Trains in a temporary directory. The training is stopped and resumed after
/// each of `stops` micro-batches.
inline Ended run(TrainConfig config, const std::vector<int>& stops = {},
                 TrainListener* listener = nullptr, const Failing& failing = {},
                 const MakePlanner& planner = {}) {
  const TemporaryDirectory base;
  config.resolve();
  Ended ended;
  for (size_t i = 0; i <= stops.size(); ++i) {
    auto directory =
        i == 0 ? RunDirectory::create(base.path() + "/run", to_json(config))
               : RunDirectory::open(base.path() + "/run");
    int left = i < stops.size() ? stops[i] : -1;
    TrainRun how;
    how.directory = &directory;
    how.resume = i > 0;
    how.listener = listener;
    how.stop = [&left] { return left-- == 0; };
    const TrainConfig saved = config_from_json(directory.config());
    // A planner may draw random numbers; make_inputs() seeds the generators.
    auto plans = planner ? planner() : nullptr;
    const TrainInputs inputs = make_inputs(saved);
    const int64_t first =
        device().is_cpu() ? allocations_of_fingerprint(inputs) : 0;
    Trainer trainer(inputs, saved, {.planner = std::move(plans)});
    {
      std::optional<AllocationFailure> failure;
      if (i == failing.part) {
        failure.emplace(failing.after == std::numeric_limits<int64_t>::max()
                            ? failing.after
                            : first + failing.after);
      }
      ended.result = trainer.run(how);
      if (failure) ended.allocations = failure->counted() - first;
    }
    EXPECT_EQ(ended.result.stopped, i < stops.size());
    ended.tensors =
        detail::newest_state(directory, [](const auto&) { FAIL(); })->tensors;
    ended.metrics = read_text(directory.metrics_path());
    ended.config = config_from_json(directory.config());
  }
  return ended;
}

inline void expect_same(const Ended& a, const Ended& b,
                        const std::string& what) {
  ASSERT_EQ(a.tensors.size(), b.tensors.size()) << what;
  for (size_t i = 0; i < a.tensors.size(); ++i) {
    EXPECT_EQ(a.tensors[i].first, b.tensors[i].first);
    EXPECT_TRUE(same(a.tensors[i].second, b.tensors[i].second))
        << what << ": " << a.tensors[i].first;
  }
  if (device().is_cpu()) {
    EXPECT_EQ(a.metrics, b.metrics) << what;
  }
}

}  // namespace reprise::testing
