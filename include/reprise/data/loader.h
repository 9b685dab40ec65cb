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
  /// Samples a window; 0: none. Windows begin at multiples of it in an epoch, so
  /// a position alone tells the place in a window. A window's last batch is what
  /// is left of it: 10 as 3, 3, 3 and 1. An epoch's last window may be short.
  int64_t window = 0;
  /// Which part of each window is handed out, of how many: windows are divided into
  /// `shares` runs of samples as equal as they can be, the first ones a sample
  /// larger. With others than the defaults a window is needed.
  int share = 0;
  int shares = 1;
  bool shuffle = true;
  uint64_t seed = 1;
  int workers = 4;   ///< threads; 0: read on the caller's thread
  int queue = 0;     ///< batches read ahead; 0: two a worker
  bool pin = false;  ///< hand over in pinned memory (CUDA)
  /// Applied to each batch on the worker, such as enlarging images there. Called
  /// by several threads at once, without gradients; operators run on the worker
  /// alone.
  std::function<void(Batch&)> transform{};
};

/// Hands out batches in an order that depends on the seed and the epoch alone,
/// not on the number of workers. The last batch of a window and of an epoch may be
/// smaller; batches never span either. Workers go on into the next epoch while the caller
/// finishes this one. One caller at a time; the destructor waits for the workers
/// to end the batches they are at.
///
/// An exception of a worker is thrown by `next()` in its place in the order, and
/// again by each call after that: what cannot be read is never skipped. The
/// constructor throws c10::Error on options that make no sense and on a position
/// outside the dataset.
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

  /// What was handed out, not what was read ahead. A loader made with it, the
  /// same data, batch size, window and seed hands out what this one would have;
  /// with another batch size it goes on at the same sample. With several shares it
  /// knows whole windows only: the window's beginning until pass_window(). A loader
  /// made with a position within a window hands out a share of what is left of it.
  LoaderPosition position() const;

  /// Batches left in this epoch, and what the next `batches` of them count
  /// together (samples or tokens), without waiting for them.
  int64_t batches_left() const;
  int64_t count_ahead(int64_t batches) const;

  /// What is left of the window at hand; at an epoch's end, nothing.
  struct Window {
    int64_t batches = 0;      ///< to be handed out here
    int64_t count = 0;        ///< of these, samples or tokens
    int64_t total_count = 0;  ///< of all shares
    int64_t samples = 0;      ///< of all shares
  };
  Window window_ahead() const;
  /// After a window's batches, of which a share may have none: the next window is at
  /// hand. Without shares next() does that by itself.
  void pass_window();
  /// Whether all of this epoch is handed out, to all shares.
  bool epoch_ends() const;

  /// Seconds that `next()` has waited for workers or, without them, has read.
  double waited_s() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace reprise
