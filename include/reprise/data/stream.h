#pragma once

#include <reprise/data/dataset.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace reprise {

/// A reader of a StreamDataset, which returns its samples one after another. Used by
/// one thread at a time.
class SampleStream {
 public:
  virtual ~SampleStream() = default;
  /// Reads the next `samples` samples. The samples must not depend on how many are
  /// read at once: read(2) and read(3) return those of read(5). A stream does not
  /// end; one over files starts again with the first. Throws c10::Error if a sample
  /// cannot be read.
  virtual Batch read(int64_t samples) = 0;
  /// Passes over the next `samples` samples, and returns what they add to
  /// Batch::count. Each of several ranks passes over the samples of the others. The
  /// default reads them; override it if the count is known without that.
  virtual int64_t skip(int64_t samples) { return read(samples).count; }
  /// The position after the last sample read or passed over: any bytes, at least one.
  /// Called after every micro-batch.
  virtual std::string position() const = 0;
};

/// Data without a size, which is read in its own order: a generator, a server, shards
/// of files. Used as any other dataset, but only for training, with
/// TrainOptions::steps.
///
/// A saved state has the position after the last sample that was trained on, not of
/// those read ahead, so that a run that is stopped and resumed at any point trains on
/// every sample exactly once. Every rank reads the whole stream, which must give all of
/// them the same samples, and trains on its share of each window.
class StreamDataset : public Dataset {
 public:
  /// Returned by size().
  static constexpr int64_t kEndless = int64_t{1} << 62;

  /// Returns a reader that continues at `position`, which an earlier one has returned;
  /// empty: the beginning. Called at the start of a training, and again after an
  /// evaluation, when a window is repeated, and to measure plans. A source that cannot
  /// go back must therefore keep what it has delivered since the last saved state.
  virtual std::unique_ptr<SampleStream> open(
      const std::string& position) const = 0;

  int64_t size() const final { return kEndless; }
  /// The first samples; `indices` must be 0, 1, 2, ...
  Batch get(const std::vector<int64_t>& indices) const final;
  /// The first samples. Override it if shapes differ; see Dataset::largest().
  Batch largest(int64_t samples) const override;
};

}  // namespace reprise
