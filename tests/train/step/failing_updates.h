#pragma once

#include "train/step/graph_runs.h"

#include <reprise/train/run_directory.h>

#include <optional>
#include <string>

namespace reprise::testing {

/// What became of trainings in which an allocation failed.
struct FailedUpdates {
  int continued = 0;  ///< in the middle of a backward
  int ended = 0;      ///< with an error, and were resumed
};

/// A model whose weights are large in comparison with its activations, so that every backward
/// can be continued; see most_held_bytes().
inline TrainConfig heavy(TrainConfig config) {
  config.model_options.width = 64;
  config.model_options.depth = 4;
  if (config.model == "gpt2") config.model_options.seq = 4;
  config.batch = 2;
  config.random_samples = 10;
  config.epochs = 1;
  return config;
}

/// Trains with one failed allocation, at `points` places all over the training. The training,
/// which is resumed if it ends, must give the result of `plain`.
inline FailedUpdates fail_all_over(TrainConfig config, const Ended& plain,
                                   const std::string& what, int points) {
  config.workers = 0;
  config.save_every = 1;
  const int64_t all = run(config, {}, nullptr, {0}).allocations;
  config.resolve();
  FailedUpdates outcome;
  for (int i = 0; i < points; ++i) {
    const int64_t after = all * (3 * i + 1) / (3 * points);
    const std::string where = what + ", allocation " + std::to_string(after);
    const TemporaryDirectory base;
    const std::string path = base.path() + "/run";
    Warnings warnings;
    const auto train = [&](bool fails) {
      auto directory = fails ? RunDirectory::create(path, to_json(config))
                             : RunDirectory::open(path);
      const TrainInputs inputs = make_inputs(config);
      const int64_t first = allocations_of_fingerprint(inputs);
      Trainer trainer(inputs, config);
      TrainRun how;
      how.directory = &directory;
      how.listener = &warnings;
      how.resume = !fails;
      std::optional<AllocationFailure> failure;
      if (fails) failure.emplace(first + after);
      trainer.run(how);
    };
    std::string error;
    try {
      train(true);
    } catch (const c10::Error& caught) {
      error = caught.what_without_backtrace();
    }
    outcome.continued += warnings.count("; continues with the first");
    if (!error.empty()) {
      EXPECT_NE(error.find("resume from the last saved state"),
                std::string::npos)
          << where << ": " << error;
      ++outcome.ended;
      train(false);
    }
    const auto state = detail::newest_state(
        RunDirectory::open(path), [](const auto& text) { FAIL() << text; });
    if (!state || state->tensors.size() != plain.tensors.size()) {
      ADD_FAILURE() << where << ": the state is not complete";
      continue;
    }
    for (size_t t = 0; t < plain.tensors.size(); ++t) {
      EXPECT_TRUE(same(state->tensors[t].second, plain.tensors[t].second))
          << where << ": " << plain.tensors[t].first;
    }
  }
  return outcome;
}

}  // namespace reprise::testing
