#pragma once

#include "train/step/ranks.h"
#include "train/step/train_setup.h"

#include <reprise/data/loader.h>

#include <cstdint>
#include <memory>

namespace reprise::detail {

/// Training batches of this rank: read ahead by workers, moved to the device and prepared.
class BatchSource {
 public:
  /// Keeps references to both.
  BatchSource(const TrainSetup& setup, const Ranks& ranks);

  /// Starts reading at `position` with the sizes of the setup's options.
  void open(const LoaderPosition& position);
  /// Ends the workers and frees what they have read ahead.
  void close();

  /// Next batch, on the device. It stays current until next() or release().
  const Batch& next();
  const Batch& current() const { return current_; }
  void release() { current_ = {}; }

  /// A batch of one sample, for a rank that has none of its own.
  Batch any_sample() const;

  /// Window that begins at the current position. At the end of an epoch moves on to the
  /// next one.
  Loader::Window window_ahead();

  Loader& loader() { return *loader_; }
  const Loader& loader() const { return *loader_; }

  /// Seconds that next() has waited for data since the beginning.
  double waited_s() const;

 private:
  const TrainSetup& setup_;
  const Ranks& ranks_;
  std::unique_ptr<Loader> loader_;
  Batch current_;
  double waited_before_s_ = 0;  // by loaders that are closed
};

}  // namespace reprise::detail
