#pragma once

#include <reprise/data/dataset.h>

#include <functional>
#include <memory>
#include <optional>

namespace reprise {

/// Where a loader stands: so many samples of so many-th epoch are handed out.
struct LoaderPosition {
  int64_t epoch = 0;
  int64_t sample = 0;
  bool operator==(const LoaderPosition&) const = default;
};

struct LoaderOptions {
  int64_t batch = 1;
  bool shuffle = true;
  uint64_t seed = 1;
  int workers = 4;   ///< threads; 0: read on the caller's thread
  int queue = 0;     ///< batches read ahead; 0: two a worker
  bool pin = false;  ///< hand over in pinned memory (CUDA)
  /// Applied to each batch on the worker, such as enlarging images there.
  std::function<void(Batch&)> transform{};
};

/// Hands out batches in an order that depends on the seed and the epoch alone,
/// not on the number of workers. The last batch of an epoch may be smaller;
/// batches never span epochs. One caller at a time. An exception of a worker
/// is thrown by `next()` in its place in the order.
class Loader {
 public:
  Loader(std::shared_ptr<const Dataset> dataset, LoaderOptions options,
         LoaderPosition position = {});
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// The next batch; nothing at the end of an epoch, once: the call after that
  /// begins the next one.
  std::optional<Batch> next();

  LoaderPosition position() const;

  /// Batches left in this epoch, and what the next `batches` of them count
  /// together (samples or tokens), without waiting for them.
  int64_t batches_left() const;
  int64_t count_ahead(int64_t batches) const;

  /// Seconds that `next()` has waited for workers.
  double waited_s() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace reprise
