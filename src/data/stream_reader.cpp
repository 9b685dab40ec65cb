// Tested by tests/data/stream_test.cpp.
#include "compat/threads.h"
#include "data/batch_check.h"
#include "data/batch_reader.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

namespace reprise {
namespace detail {
namespace {

/// The batches of this shard in a window, or in the remainder of one.
struct StreamWindow {
  struct Item {
    Batch batch;
    LoaderPosition after;
  };
  std::deque<Item> items;
  int64_t total_count = 0;  // of all shards
  int64_t samples = 0;      // of all shards
  LoaderPosition after;     // the whole window
  std::exception_ptr error;
};

// One thread reads the window after the current one and waits until it is taken, so that
// at most two windows are in memory. Without threads, windows are read when needed.
class StreamReader final : public BatchReader {
 public:
  StreamReader(std::shared_ptr<const StreamDataset> dataset,
               LoaderOptions options, LoaderPosition position)
      : options_(std::move(options)), at_(position), read_(position) {
    if (options_.window == 0) options_.window = options_.batch;
    TORCH_CHECK(options_.num_shards <= options_.window,
                "[loader] expected at least one sample per window for each of ",
                options_.num_shards, " shards, got windows of ",
                options_.window);
    TORCH_CHECK(
        position.epoch == 0 && position.sample >= 0 &&
            (position.sample == 0) == position.stream.empty(),
        "[loader] expected a position of a stream, got epoch ", position.epoch,
        ", sample ", position.sample,
        position.stream.empty() ? " without" : " with",
        " the position of a stream; was it saved with another dataset?");
    stream_ = dataset->open(position.stream);
    TORCH_CHECK(stream_ != nullptr,
                "[stream] expected open() to return a reader, got null");
  }

  ~StreamReader() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  void start() override {
    if (options_.workers > 0) thread_ = std::thread([this] { work(); });
  }

  std::optional<Batch> next() override {
    // With several shards, a window may have no batches for this one.
    while (current_.items.empty()) {
      if (has_window_) advance_window();
      fetch();
    }
    StreamWindow::Item item = std::move(current_.items.front());
    current_.items.pop_front();
    current_.samples -= single() ? item.batch.samples : 0;
    current_.total_count -= single() ? item.batch.count : 0;
    if (single()) at_ = std::move(item.after);
    return std::move(item.batch);
  }

  LoaderPosition position() const override { return at_; }

  int64_t batches_left() const override {
    return static_cast<int64_t>(current_.items.size());
  }

  int64_t count_ahead(int64_t batches) override {
    int64_t count = 0;
    for (const auto& item : current_.items) {
      if (batches-- > 0) count += item.batch.count;
    }
    return count;
  }

  Loader::Window window_ahead() override {
    if (has_window_ && single() && current_.items.empty()) advance_window();
    fetch();
    return {batches_left(), count_ahead(batches_left()), current_.total_count,
            current_.samples};
  }

  void advance_window() override {
    fetch();
    at_ = std::move(current_.after);
    current_ = {};
    has_window_ = false;
  }

  bool window_done() const override {
    return has_window_ ? current_.items.empty()
                       : at_.sample % options_.window == 0;
  }
  bool epoch_done() const override { return false; }
  double waited_s() const override { return waited_s_; }

 private:
  bool single() const { return options_.num_shards == 1; }

  /// Makes the next window the current one, unless there is a current one.
  void fetch() {
    if (has_window_) return;
    const auto start = std::chrono::steady_clock::now();
    if (options_.workers == 0) {
      // The stream is at an unknown position after a failure.
      if (failure_) std::rethrow_exception(failure_);
      try {
        current_ = read_window();
      } catch (...) {
        failure_ = std::current_exception();
        throw;
      }
    } else {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return ready_; });
      // The error stays, so that later calls throw it again.
      if (ahead_.error) std::rethrow_exception(ahead_.error);
      current_ = std::exchange(ahead_, {});
      ready_ = false;
      lock.unlock();
      changed_.notify_all();
    }
    has_window_ = true;
    waited_s_ +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
            .count();
  }

  void work() {
    compat::run_operators_on_this_thread();
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stop_ || !ready_; });
      if (stop_) return;
      lock.unlock();
      StreamWindow window;
      try {
        window = read_window();
      } catch (...) {
        window = {};
        window.error = std::current_exception();
      }
      lock.lock();
      ahead_ = std::move(window);
      ready_ = true;
      changed_.notify_all();
    }
  }

  /// Reads the window that begins at `read_`.
  StreamWindow read_window() {
    const torch::NoGradGuard no_grad;
    StreamWindow window;
    window.samples = options_.window - read_.sample % options_.window;
    const auto [begin, end] = shard_of(window.samples, options_);
    skip(begin, window);
    for (int64_t left = end - begin; left > 0;) {
      const int64_t samples = std::min(left, options_.batch);
      Batch batch = stream_->read(samples);
      check_batch(batch, samples, std::nullopt);
      window.total_count += batch.count;
      moved(samples);
      finish_batch(batch, options_);
      window.items.push_back({std::move(batch), read_});
      left -= samples;
    }
    skip(window.samples - end, window);
    window.after = read_;
    return window;
  }

  void skip(int64_t samples, StreamWindow& window) {
    while (samples > 0) {
      const int64_t some = std::min(samples, options_.batch);
      const int64_t count = stream_->skip(some);
      TORCH_CHECK(count >= 0,
                  "[stream] expected skip() to return a count of at least 0, "
                  "got ",
                  count);
      window.total_count += count;
      moved(some);
      samples -= some;
    }
  }

  void moved(int64_t samples) {
    read_.sample += samples;
    read_.stream = stream_->position();
    TORCH_CHECK(!read_.stream.empty(),
                "[stream] expected a position() with at least one byte after ",
                read_.sample,
                " samples, got an empty one, which means the beginning");
  }

  LoaderOptions options_;

  // Used by the caller's thread only.
  LoaderPosition at_;
  StreamWindow current_;
  bool has_window_ = false;
  double waited_s_ = 0;
  std::exception_ptr failure_;  // without a thread

  // Used by the thread that reads.
  std::unique_ptr<SampleStream> stream_;
  LoaderPosition read_;

  std::mutex mutex_;  // guards all members below
  std::condition_variable changed_;
  StreamWindow ahead_;
  bool ready_ = false, stop_ = false;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<BatchReader> make_stream_reader(
    std::shared_ptr<const StreamDataset> dataset, LoaderOptions options,
    LoaderPosition position) {
  return std::make_unique<StreamReader>(std::move(dataset), std::move(options),
                                        std::move(position));
}

}  // namespace detail

namespace {

Batch first_samples(const StreamDataset& data, int64_t samples) {
  const auto stream = data.open("");
  TORCH_CHECK(stream != nullptr,
              "[stream] expected open() to return a reader, got null");
  return stream->read(samples);
}

}  // namespace

Batch StreamDataset::get(const std::vector<int64_t>& indices) const {
  for (size_t i = 0; i < indices.size(); ++i) {
    TORCH_CHECK(indices[i] == static_cast<int64_t>(i),
                "[stream] expected the first samples in order, got index ",
                indices[i], " at ", i, "; use open() to read further");
  }
  return first_samples(*this, static_cast<int64_t>(indices.size()));
}

Batch StreamDataset::largest(int64_t samples) const {
  return first_samples(*this, samples);
}

}  // namespace reprise
