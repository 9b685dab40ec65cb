#pragma once

#include <reprise/data/dataset.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace reprise {

namespace detail {
class BatchReader;
}

/// The position of a loader: `sample` samples of epoch `epoch` were returned.
struct LoaderPosition {
  int64_t epoch = 0;
  int64_t sample = 0;
  std::string stream{};  ///< SampleStream::position(); empty: the beginning
  bool operator==(const LoaderPosition&) const = default;
};

struct LoaderOptions {
  int64_t batch = 1;  ///< samples per batch
  /// Samples per accumulation window; 0: no windows. Windows start at multiples
  /// of this value in an epoch, so that a position also determines the place
  /// within a window. The last batch of a window may be smaller: a window of 10
  /// has batches of 3, 3, 3 and 1. The last window of an epoch may be smaller.
  int64_t window = 0;
  /// Which shard of every window this loader returns, and the number of shards.
  /// Shards are contiguous and differ in size by at most one sample; the first
  /// ones are larger. Sharding requires windows.
  int shard = 0;
  int num_shards = 1;
  bool shuffle = true;  ///< Dataset::order(), else by index; not for streams
  uint64_t seed = 1;
  int workers = 4;   ///< worker threads; 0: read on the calling thread
  int queue = 0;     ///< batches read ahead; 0: two per worker
  bool pin = false;  ///< return batches in pinned memory (CUDA)
  /// Applied to every batch on the worker thread, for example to resize images.
  /// Called by several threads at once, in no-grad mode. Operators inside it run
  /// on that thread only.
  std::function<void(Batch&)> transform{};
};

/// Returns the batches of a dataset in an order that depends only on the seed and
/// the epoch, not on the number of workers. The last batch of a window or an
/// epoch may be smaller; no batch spans two windows or epochs. Workers read ahead
/// into the next epoch.
///
/// A stream (stream.h) has one endless epoch. It is read window by window, without
/// windows batch by batch, because the count of a window must be known before its
/// first batch is used: up to two windows of this shard are in memory, or one
/// without workers. Of several workers, one reads.
///
/// Must be used by one thread at a time. The destructor waits for the workers to
/// finish their current batches.
///
/// If a worker throws, next() rethrows the exception at the position of that
/// batch, and again in every later call: no batch is ever skipped.
class Loader {
 public:
  /// Throws c10::Error if an option is invalid, the dataset has no samples or the
  /// position lies outside of it.
  Loader(std::shared_ptr<const Dataset> dataset, LoaderOptions options,
         LoaderPosition position = {});
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// Returns the next batch. At the end of an epoch it returns nullopt once; the
  /// following call starts the next epoch. Throws c10::Error if the dataset returned
  /// something else than it was asked for: another number of samples, a count that
  /// is not the sum of Dataset::count(), no or undefined tensors.
  std::optional<Batch> next();

  /// The position after the last returned batch; batches read ahead do not
  /// count. A loader created with this position and the same dataset, window and
  /// seed continues at the same sample, even with another batch size. With
  /// several shards, the position is the start of the current window until
  /// advance_window(). A loader created with a position inside a window shards
  /// the remainder of that window.
  LoaderPosition position() const;

  /// Number of batches left in this epoch; of a stream, in this window.
  int64_t batches_left() const;
  /// The sum of Batch::count over the next `batches` batches of this epoch,
  /// without reading them.
  int64_t count_ahead(int64_t batches) const;

  /// The remainder of the current window; all zero at the end of an epoch.
  struct Window {
    int64_t batches = 0;      ///< batches of this shard
    int64_t count = 0;        ///< sum of Batch::count of this shard
    int64_t total_count = 0;  ///< sum of Batch::count of all shards
    int64_t samples = 0;      ///< samples of all shards
  };
  Window window_ahead() const;
  /// Moves to the next window. Needed only with several shards, after all batches
  /// of this shard, of which there may be none. Otherwise next() does it.
  void advance_window();
  /// Whether this shard has returned all batches of the current window.
  bool window_done() const;
  /// Whether all shards have returned all samples of this epoch.
  bool epoch_done() const;

  /// Total seconds that next() has waited for workers or, without workers, has
  /// spent on reading.
  double waited_s() const;

 private:
  std::unique_ptr<detail::BatchReader> reader_;
};

}  // namespace reprise
