#include "base/splitmix.h"
#include "compat/threads.h"

#include <reprise/data/loader.h>

#include <c10/util/Exception.h>
#include <torch/cuda.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <utility>

namespace reprise {
namespace {

using Order = std::shared_ptr<const std::vector<int64_t>>;

/// A uniform number below `limit`. std::uniform_int_distribution is not used because
/// its results differ between implementations.
uint64_t below(std::mt19937_64& generator, uint64_t limit) {
  const uint64_t rejected = (0 - limit) % limit;  // 2^64 mod limit
  uint64_t number = generator();
  while (number < rejected) number = generator();
  return number % limit;
}

/// A random permutation (Fisher-Yates).
Order shuffled(int64_t size, uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::vector<int64_t> order(static_cast<size_t>(size));
  std::iota(order.begin(), order.end(), int64_t{0});
  for (size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[below(generator, i)]);
  }
  return std::make_shared<const std::vector<int64_t>>(std::move(order));
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
      .count();
}

}  // namespace

// Batches are numbered across epochs. A worker takes the next number under the lock,
// reads the batch without it, and stores the result in slot `number % queue` of a ring
// buffer. A number is handed out only when its slot is free, which bounds the number of
// batches read ahead.
class Loader::Impl {
 public:
  Impl(std::shared_ptr<const Dataset> dataset, LoaderOptions options,
       LoaderPosition position)
      : dataset_(std::move(dataset)), options_(std::move(options)) {
    TORCH_CHECK(dataset_ != nullptr && dataset_->size() > 0,
                "[loader] expected a dataset with samples, got none");
    size_ = dataset_->size();
    TORCH_CHECK(options_.batch > 0, "[loader] expected a batch above 0, got ",
                options_.batch);
    TORCH_CHECK(options_.window >= 0,
                "[loader] expected a window of at least 0, got ",
                options_.window);
    TORCH_CHECK(options_.num_shards >= 1 && options_.shard >= 0 &&
                    options_.shard < options_.num_shards,
                "[loader] expected a shard below ", options_.num_shards,
                ", got ", options_.shard);
    TORCH_CHECK(options_.num_shards == 1 ||
                    options_.num_shards <= std::min(options_.window, size_),
                "[loader] expected at least one sample per window and dataset "
                "for each of ",
                options_.num_shards, " shards, got windows of ",
                options_.window, " and ", size_, " samples");
    TORCH_CHECK(options_.workers >= 0 && options_.queue >= 0,
                "[loader] expected workers and queue of at least 0, got ",
                options_.workers, " and ", options_.queue);
    TORCH_CHECK(
        position.epoch >= 0 && position.sample >= 0 && position.sample <= size_,
        "[loader] expected a position of at most ", size_,
        " samples, the size of the dataset, got epoch ", position.epoch,
        ", sample ", position.sample, "; was it saved with another dataset?");
    TORCH_CHECK(
        !options_.pin || torch::cuda::is_available(),
        "[loader] expected a CUDA device for pinned memory, found none");
    cursor_ = planned_ = enter(position);
    const int queue =
        options_.queue > 0 ? options_.queue : 2 * options_.workers;
    slots_.resize(static_cast<size_t>(queue));
  }

  ~Impl() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    room_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  /// Separate from the constructor, so that the destructor joins the started threads if
  /// the system cannot start another one.
  void start() {
    for (int i = 0; i < options_.workers; ++i) {
      workers_.emplace_back([this] { work(); });
    }
  }

  std::optional<Batch> next() {
    while (cursor_.at == cursor_.stop && cursor_.end < size_) advance_window();
    if (cursor_.at == cursor_.stop) {
      cursor_ = enter({cursor_.epoch + 1, 0});
      forget_orders();
      return std::nullopt;
    }
    Batch batch = options_.workers > 0 ? take() : read_here();
    cursor_.at += batch_samples(cursor_);
    return batch;
  }

  LoaderPosition position() const {
    return {cursor_.epoch,
            options_.num_shards == 1 ? cursor_.at : cursor_.begin};
  }

  int64_t batches_left() const {
    const int64_t here = batches_of(cursor_.stop - cursor_.at);
    const int64_t rest = size_ - cursor_.end;
    if (rest == 0) return here;
    return here + rest / options_.window * batches_in(options_.window) +
           batches_in(rest % options_.window);
  }

  int64_t count_ahead(int64_t batches) {
    int64_t count = 0;
    for (Cursor at = cursor_; batches > 0; --batches) {
      while (at.at == at.stop && at.end < size_) at = enter(at.next());
      if (at.at == at.stop) break;
      const int64_t end = at.at + batch_samples(at);
      count += count_of(at.epoch, at.at, end);
      at.at = end;
    }
    return count;
  }

  Window window_ahead() {
    const bool over = options_.num_shards == 1 && cursor_.at == cursor_.end;
    const Cursor at = over ? enter(cursor_.next()) : cursor_;
    const int64_t begin = options_.num_shards == 1 ? at.at : at.begin;
    return {batches_of(at.stop - at.at), count_of(at.epoch, at.at, at.stop),
            count_of(at.epoch, begin, at.end), at.end - begin};
  }

  void advance_window() { cursor_ = enter(cursor_.next()); }

  bool epoch_done() const {
    return cursor_.begin == size_ ||
           (options_.num_shards == 1 && cursor_.at == size_);
  }

  double waited_s() const { return waited_s_; }

 private:
  struct Slot {
    bool ready = false;
    Batch batch;
    std::exception_ptr error;
  };

  /// The current window and the range of it that this shard has yet to return.
  struct Cursor {
    int64_t epoch = 0;
    int64_t begin = 0, end = 0;  // the window, or the remainder of it
    int64_t at = 0, stop = 0;    // the remaining range of this shard
    LoaderPosition next() const { return {epoch, end}; }
  };

  Cursor enter(const LoaderPosition& from) const {
    Cursor c;
    c.epoch = from.epoch;
    c.begin = from.sample;
    c.end = options_.window == 0
                ? size_
                : std::min(size_, from.sample + options_.window -
                                      from.sample % options_.window);
    const int64_t samples = c.end - c.begin;
    const int64_t larger = samples % options_.num_shards;
    c.at = c.begin + options_.shard * (samples / options_.num_shards) +
           std::min<int64_t>(options_.shard, larger);
    c.stop = c.at + shard_of(samples);
    return c;
  }

  int64_t shard_of(int64_t samples) const {
    return samples / options_.num_shards +
           (options_.shard < samples % options_.num_shards ? 1 : 0);
  }

  int64_t batches_in(int64_t window) const {
    return batches_of(shard_of(window));
  }

  int64_t batch_samples(const Cursor& from) const {
    return std::min(options_.batch, from.stop - from.at);
  }

  /// The count of the samples from `begin` to `end` in the order of the epoch.
  int64_t count_of(int64_t epoch, int64_t begin, int64_t end) {
    if (begin == end) return 0;
    const Order order = order_of(epoch);
    int64_t count = 0;
    for (int64_t i = begin; i < end; ++i) {
      count += dataset_->count(order ? (*order)[static_cast<size_t>(i)] : i);
    }
    return count;
  }

  int64_t batches_of(int64_t samples) const {
    return (samples + options_.batch - 1) / options_.batch;
  }

  /// The order of an epoch; null without shuffling.
  Order order_of(int64_t epoch) {
    if (!options_.shuffle) return nullptr;
    const std::lock_guard lock(orders_mutex_);
    Order& order = orders_[epoch];
    if (!order) {
      order = shuffled(
          size_, detail::splitmix(options_.seed, static_cast<uint64_t>(epoch)));
    }
    return order;
  }

  void forget_orders() {
    const std::lock_guard lock(orders_mutex_);
    orders_.erase(orders_.begin(), orders_.lower_bound(cursor_.epoch));
  }

  Batch read(const Cursor& from) {
    const torch::NoGradGuard no_grad;
    std::vector<int64_t> indices(static_cast<size_t>(batch_samples(from)));
    std::iota(indices.begin(), indices.end(), from.at);
    if (const Order order = order_of(from.epoch)) {
      for (int64_t& index : indices) {
        index = (*order)[static_cast<size_t>(index)];
      }
    }
    Batch batch = dataset_->get(indices);
    if (options_.transform) options_.transform(batch);
    if (options_.pin) {
      for (auto& tensor : batch.tensors) {
        if (tensor.defined()) tensor = tensor.pin_memory();
      }
    }
    return batch;
  }

  void work() {
    compat::run_operators_on_this_thread();
    std::unique_lock lock(mutex_);
    while (true) {
      room_.wait(lock, [this] {
        return stop_ || issued_ - taken_ < static_cast<int64_t>(slots_.size());
      });
      if (stop_) return;
      Slot& slot = slot_of(issued_++);
      while (planned_.at == planned_.stop) {
        planned_ =
            enter(planned_.end < size_ ? planned_.next()
                                       : LoaderPosition{planned_.epoch + 1, 0});
      }
      const Cursor from = planned_;
      planned_.at += batch_samples(planned_);

      lock.unlock();
      Batch batch;
      std::exception_ptr error;
      try {
        batch = read(from);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      slot.batch = std::move(batch);
      slot.error = std::move(error);
      slot.ready = true;
      ready_.notify_one();
    }
  }

  Batch take() {
    std::unique_lock lock(mutex_);
    Slot& slot = slot_of(taken_);
    if (!slot.ready) {
      const auto start = std::chrono::steady_clock::now();
      ready_.wait(lock, [&slot] { return slot.ready; });
      waited_s_ += seconds_since(start);
    }
    // The error stays in its slot, so that later calls throw it again.
    if (slot.error) std::rethrow_exception(slot.error);
    Batch batch = std::exchange(slot.batch, {});
    slot.ready = false;
    ++taken_;
    lock.unlock();
    room_.notify_one();
    return batch;
  }

  Batch read_here() {
    const auto start = std::chrono::steady_clock::now();
    Batch batch = read(cursor_);
    waited_s_ += seconds_since(start);
    return batch;
  }

  Slot& slot_of(int64_t number) {
    return slots_[static_cast<size_t>(number) % slots_.size()];
  }

  const std::shared_ptr<const Dataset> dataset_;
  const LoaderOptions options_;
  int64_t size_ = 0;

  // Used by the caller's thread only.
  Cursor cursor_;
  double waited_s_ = 0;

  // A mutex of its own, since shuffling a large dataset takes long.
  std::mutex orders_mutex_;
  std::map<int64_t, Order> orders_;

  std::mutex mutex_;  // guards all members below
  std::condition_variable room_, ready_;
  std::vector<Slot> slots_;
  Cursor planned_;                  // start of the next batch to issue
  int64_t issued_ = 0, taken_ = 0;  // batches issued to workers, and returned
  bool stop_ = false;
  std::vector<std::thread> workers_;
};

Loader::Loader(std::shared_ptr<const Dataset> dataset, LoaderOptions options,
               LoaderPosition position)
    : impl_(std::make_unique<Impl>(std::move(dataset), std::move(options),
                                   position)) {
  impl_->start();
}

Loader::~Loader() = default;

std::optional<Batch> Loader::next() {
  return impl_->next();
}

LoaderPosition Loader::position() const {
  return impl_->position();
}

int64_t Loader::batches_left() const {
  return impl_->batches_left();
}

int64_t Loader::count_ahead(int64_t batches) const {
  return impl_->count_ahead(batches);
}

Loader::Window Loader::window_ahead() const {
  return impl_->window_ahead();
}

void Loader::advance_window() {
  impl_->advance_window();
}

bool Loader::epoch_done() const {
  return impl_->epoch_done();
}

double Loader::waited_s() const {
  return impl_->waited_s();
}

}  // namespace reprise
