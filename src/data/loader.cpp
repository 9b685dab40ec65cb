#include "base/splitmix.h"
#include "compat/threads.h"
#include "data/batch_check.h"
#include "data/batch_reader.h"

#include <reprise/data/loader.h>
#include <reprise/data/stream.h>

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

// Batches are numbered across epochs. A worker takes the next number under the lock,
// reads the batch without it, and stores the result in slot `number % queue` of a ring
// buffer. A number is handed out only when its slot is free, which bounds the number of
// batches read ahead.
class MapReader final : public detail::BatchReader {
 public:
  MapReader(std::shared_ptr<const Dataset> dataset, LoaderOptions options,
            const LoaderPosition& position)
      : dataset_(std::move(dataset)), options_(std::move(options)) {
    size_ = options_.shuffle ? dataset_->epoch_size() : dataset_->size();
    TORCH_CHECK(size_ > 0,
                "[loader] expected a dataset with samples, got a size of ",
                size_);
    TORCH_CHECK(options_.num_shards == 1 ||
                    options_.num_shards <= std::min(options_.window, size_),
                "[loader] expected at least one sample per window and dataset "
                "for each of ",
                options_.num_shards, " shards, got windows of ",
                options_.window, " and ", size_, " samples");
    TORCH_CHECK(
        position.epoch >= 0 && position.sample >= 0 && position.sample <= size_,
        "[loader] expected a position of at most ", size_,
        " samples, the size of the dataset, got epoch ", position.epoch,
        ", sample ", position.sample, "; was it saved with another dataset?");
    cursor_ = planned_ = enter(position);
    const int queue =
        options_.queue > 0 ? options_.queue : 2 * options_.workers;
    slots_.resize(static_cast<size_t>(queue));
    if (!options_.shuffle) return;
    if (auto order = dataset_->order(position.epoch, options_.seed)) {
      own_order_ = true;
      orders_[position.epoch] = checked(std::move(*order), position.epoch);
      make_orders(position.epoch);
    }
  }

  ~MapReader() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    room_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  void start() override {
    for (int i = 0; i < options_.workers; ++i) {
      workers_.emplace_back([this] { work(); });
    }
  }

  std::optional<Batch> next() override {
    while (cursor_.at == cursor_.stop && cursor_.end < size_) advance_window();
    if (cursor_.at == cursor_.stop) {
      make_orders(cursor_.epoch + 1);
      cursor_ = enter({cursor_.epoch + 1, 0, ""});
      forget_orders();
      return std::nullopt;
    }
    Batch batch = options_.workers > 0 ? take() : read_here();
    cursor_.at += batch_samples(cursor_);
    return batch;
  }

  LoaderPosition position() const override {
    return {cursor_.epoch,
            options_.num_shards == 1 ? cursor_.at : cursor_.begin, ""};
  }

  int64_t batches_left() const override {
    const int64_t here = batches_of(cursor_.stop - cursor_.at);
    const int64_t rest = size_ - cursor_.end;
    if (rest == 0) return here;
    return here + rest / options_.window * batches_in(options_.window) +
           batches_in(rest % options_.window);
  }

  int64_t count_ahead(int64_t batches) override {
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

  Loader::Window window_ahead() override {
    const bool over = options_.num_shards == 1 && cursor_.at == cursor_.end;
    const Cursor at = over ? enter(cursor_.next()) : cursor_;
    const int64_t begin = options_.num_shards == 1 ? at.at : at.begin;
    return {batches_of(at.stop - at.at), count_of(at.epoch, at.at, at.stop),
            count_of(at.epoch, begin, at.end), at.end - begin};
  }

  void advance_window() override { cursor_ = enter(cursor_.next()); }

  bool window_done() const override { return cursor_.at == cursor_.stop; }

  bool epoch_done() const override {
    return cursor_.begin == size_ ||
           (options_.num_shards == 1 && cursor_.at == size_);
  }

  double waited_s() const override { return waited_s_; }

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
    LoaderPosition next() const { return {epoch, end, ""}; }
  };

  Cursor enter(const LoaderPosition& from) const {
    Cursor c;
    c.epoch = from.epoch;
    c.begin = from.sample;
    c.end = options_.window == 0
                ? size_
                : std::min(size_, from.sample + options_.window -
                                      from.sample % options_.window);
    const auto [at, stop] = detail::shard_of(c.end - c.begin, options_);
    c.at = c.begin + at;
    c.stop = c.begin + stop;
    return c;
  }

  int64_t batches_in(int64_t window) const {
    const auto [at, stop] = detail::shard_of(window, options_);
    return batches_of(stop - at);
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
      TORCH_INTERNAL_ASSERT(!own_order_);
      order = shuffled(
          size_, detail::splitmix(options_.seed, static_cast<uint64_t>(epoch)));
    }
    return order;
  }

  /// Makes the dataset's own orders of `epoch` and of all epochs that workers reach
  /// before the next call. Called by the user's thread only: Dataset::order() is not
  /// thread-safe, and may depend on generators that a training uses.
  void make_orders(int64_t epoch) {
    if (!own_order_) return;
    const int64_t whole =
        options_.window == 0
            ? batches_in(size_)
            : size_ / options_.window * batches_in(options_.window) +
                  batches_in(size_ % options_.window);
    const int64_t ahead = options_.workers == 0
                              ? 0
                              : static_cast<int64_t>(slots_.size()) /
                                        std::max<int64_t>(whole, 1) +
                                    1;
    const std::lock_guard lock(orders_mutex_);
    for (const int64_t last = epoch + ahead; epoch <= last; ++epoch) {
      Order& order = orders_[epoch];
      if (order) continue;
      auto made = dataset_->order(epoch, options_.seed);
      order = checked(made ? std::move(*made) : std::vector<int64_t>(), epoch);
    }
  }

  Order checked(std::vector<int64_t> order, int64_t epoch) const {
    TORCH_CHECK(static_cast<int64_t>(order.size()) == size_,
                "[loader] expected an order of ", size_,
                " indices for every epoch, got ", order.size(), " for epoch ",
                epoch, "; give all epochs the same length");
    detail::check_order(order, dataset_->size());
    return std::make_shared<const std::vector<int64_t>>(std::move(order));
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
    int64_t count = 0;
    for (const int64_t index : indices) count += dataset_->count(index);
    detail::check_batch(batch, static_cast<int64_t>(indices.size()), count);
    detail::finish_batch(batch, options_);
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
        planned_ = enter(planned_.end < size_
                             ? planned_.next()
                             : LoaderPosition{planned_.epoch + 1, 0, ""});
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
  int64_t size_ = 0;  // of an epoch
  bool own_order_ = false;

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

void check_loader_options(const LoaderOptions& options) {
  TORCH_CHECK(options.batch > 0, "[loader] expected a batch above 0, got ",
              options.batch);
  TORCH_CHECK(options.window >= 0,
              "[loader] expected a window of at least 0, got ", options.window);
  TORCH_CHECK(options.num_shards >= 1 && options.shard >= 0 &&
                  options.shard < options.num_shards,
              "[loader] expected a shard below ", options.num_shards, ", got ",
              options.shard);
  TORCH_CHECK(options.workers >= 0 && options.queue >= 0,
              "[loader] expected workers and queue of at least 0, got ",
              options.workers, " and ", options.queue);
  TORCH_CHECK(!options.pin || torch::cuda::is_available(),
              "[loader] expected a CUDA device for pinned memory, found none");
}

}  // namespace

namespace detail {

std::pair<int64_t, int64_t> shard_of(int64_t samples,
                                     const LoaderOptions& options) {
  const int64_t share = samples / options.num_shards;
  const int64_t larger = samples % options.num_shards;
  const int64_t begin =
      options.shard * share + std::min<int64_t>(options.shard, larger);
  return {begin, begin + share + (options.shard < larger ? 1 : 0)};
}

void finish_batch(Batch& batch, const LoaderOptions& options) {
  if (options.transform) options.transform(batch);
  if (!options.pin) return;
  for (auto& tensor : batch.tensors) {
    if (tensor.defined() && tensor.device().is_cpu()) {
      tensor = tensor.pin_memory();
    }
  }
}

}  // namespace detail

Loader::Loader(std::shared_ptr<const Dataset> dataset, LoaderOptions options,
               LoaderPosition position) {
  TORCH_CHECK(dataset != nullptr, "[loader] expected a dataset, got null");
  check_loader_options(options);
  if (auto stream = std::dynamic_pointer_cast<const StreamDataset>(dataset)) {
    reader_ = detail::make_stream_reader(std::move(stream), std::move(options),
                                         std::move(position));
  } else {
    reader_ = std::make_unique<MapReader>(std::move(dataset),
                                          std::move(options), position);
  }
  reader_->start();
}

Loader::~Loader() = default;

std::optional<Batch> Loader::next() {
  return reader_->next();
}

LoaderPosition Loader::position() const {
  return reader_->position();
}

int64_t Loader::batches_left() const {
  return reader_->batches_left();
}

int64_t Loader::count_ahead(int64_t batches) const {
  return reader_->count_ahead(batches);
}

Loader::Window Loader::window_ahead() const {
  return reader_->window_ahead();
}

void Loader::advance_window() {
  reader_->advance_window();
}

bool Loader::window_done() const {
  return reader_->window_done();
}

bool Loader::epoch_done() const {
  return reader_->epoch_done();
}

double Loader::waited_s() const {
  return reader_->waited_s();
}

}  // namespace reprise
