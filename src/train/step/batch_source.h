#pragma once

#include "data/batch_check.h"
#include "train/step/ranks.h"
#include "train/step/train_setup.h"

#include <reprise/data/loader.h>

#include <cstdint>
#include <memory>

namespace reprise::detail {

/// Training batches of this rank: read ahead by worker threads, moved to the
/// device and prepared. Tested by tests/train/loop/trainer_test.cpp.
class BatchSource {
 public:
  /// Keeps references to both arguments.
  BatchSource(const TrainSetup& setup, const Ranks& ranks);

  /// Starts reading at `position` with the batch size of the setup's options.
  void open(const LoaderPosition& position);
  /// Stops the workers and frees the batches that they have read ahead.
  void close();

  /// Returns the next batch, on the device. It is valid until next() or
  /// release().
  const Batch& next();
  const Batch& current() const { return current_; }
  void release() { current_ = {}; }

  /// Returns a batch of one sample, for a rank without samples of its own.
  Batch any_sample() const;

  /// Returns the window that begins at the current position. At the end of an
  /// epoch, starts the next one.
  Loader::Window window_ahead();

  Loader& loader() { return *loader_; }
  const Loader& loader() const { return *loader_; }

  /// Total seconds that next() has waited for data.
  double waited_s() const;

 private:
  const TrainSetup& setup_;
  const Ranks& ranks_;
  std::unique_ptr<Loader> loader_;
  Batch current_;
  BatchTypes types_;            // as the loader returns them
  double waited_before_s_ = 0;  // of loaders that were closed
};

}  // namespace reprise::detail
