#pragma once

#include <reprise/data/loader.h>
#include <reprise/data/stream.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

namespace reprise::detail {

/// Implementation of a Loader for one kind of dataset; see its members. Tested by
/// tests/data/loader_test.cpp and tests/data/stream_test.cpp.
class BatchReader {
 public:
  virtual ~BatchReader() = default;
  /// Starts the threads. Separate from the constructor, so that the destructor joins the
  /// started ones if the system cannot start another one.
  virtual void start() = 0;
  virtual std::optional<Batch> next() = 0;
  virtual LoaderPosition position() const = 0;
  virtual int64_t batches_left() const = 0;
  virtual int64_t count_ahead(int64_t batches) = 0;
  virtual Loader::Window window_ahead() = 0;
  virtual void advance_window() = 0;
  virtual bool window_done() const = 0;
  virtual bool epoch_done() const = 0;
  virtual double waited_s() const = 0;
};

/// Begin and end of the shard of `options` in a window of `samples`.
std::pair<int64_t, int64_t> shard_of(int64_t samples,
                                     const LoaderOptions& options);

/// Applies the transform of the options and pins the memory.
void finish_batch(Batch& batch, const LoaderOptions& options);

std::unique_ptr<BatchReader> make_stream_reader(
    std::shared_ptr<const StreamDataset> dataset, LoaderOptions options,
    LoaderPosition position);

}  // namespace reprise::detail
