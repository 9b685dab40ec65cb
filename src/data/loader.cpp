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

/// Below `limit`, each number as likely as the others. The standard library's
/// distributions differ between implementations; an order must not.
uint64_t below(std::mt19937_64& generator, uint64_t limit) {
  const uint64_t unfair = (0 - limit) % limit;  // 2^64 mod limit
  uint64_t number = generator();
  while (number < unfair) number = generator();
  return number % limit;
}

/// Fisher and Yates.
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

// Batches are numbered through all epochs. A worker takes the next number and
// its samples under the lock, reads without it, and puts the result into the
// number's place in a ring of `queue` places; a number is given out only when
// its place is free, which bounds what is read ahead.
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
    TORCH_CHECK(options_.shares >= 1 && options_.share >= 0 &&
                    options_.share < options_.shares,
                "[loader] expected a share below ", options_.shares, ", got ",
                options_.share);
    TORCH_CHECK(options_.shares == 1 ||
                    options_.shares <= std::min(options_.window, size_),
                "[loader] expected windows and data of at least a sample for "
                "each of ",
                options_.shares, " shares, got windows of ", options_.window,
                " and ", size_, " samples");
    TORCH_CHECK(options_.workers >= 0 && options_.queue >= 0,
                "[loader] expected workers and queue of at least 0, got ",
                options_.workers, " and ", options_.queue);
    TORCH_CHECK(
        position.epoch >= 0 && position.sample >= 0 && position.sample <= size_,
        "[loader] expected a position of at most ", size_,
        " samples as the dataset has, got epoch ", position.epoch, ", sample ",
        position.sample, "; was it saved with other data?");
    TORCH_CHECK(
        !options_.pin || torch::cuda::is_available(),
        "[loader] expected a CUDA device for pinned memory, found none");
    cursor_ = planned_ = enter(position);
    const int queue =
        options_.queue > 0 ? options_.queue : 2 * options_.workers;
    places_.resize(static_cast<size_t>(queue));
  }

  ~Impl() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    room_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  /// Apart from the constructor, so that the destructor ends those that have
  /// started where the system refuses another.
  void start() {
    for (int i = 0; i < options_.workers; ++i) {
      workers_.emplace_back([this] { work(); });
    }
  }

  std::optional<Batch> next() {
    while (cursor_.at == cursor_.stop && cursor_.end < size_) pass_window();
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
    return {cursor_.epoch, options_.shares == 1 ? cursor_.at : cursor_.begin};
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
    const bool over = options_.shares == 1 && cursor_.at == cursor_.end;
    const Cursor at = over ? enter(cursor_.next()) : cursor_;
    const int64_t begin = options_.shares == 1 ? at.at : at.begin;
    return {batches_of(at.stop - at.at), count_of(at.epoch, at.at, at.stop),
            count_of(at.epoch, begin, at.end), at.end - begin};
  }

  void pass_window() { cursor_ = enter(cursor_.next()); }

  bool epoch_ends() const {
    return cursor_.begin == size_ ||
           (options_.shares == 1 && cursor_.at == size_);
  }

  double waited_s() const { return waited_s_; }

 private:
  struct Place {
    bool ready = false;
    Batch batch;
    std::exception_ptr error;
  };

  /// A place in the order: a window, and what of it is still to be handed out here.
  struct Cursor {
    int64_t epoch = 0;
    int64_t begin = 0, end = 0;  // of the window, or what was left of it
    int64_t at = 0, stop = 0;    // of this share
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
    const int64_t larger = samples % options_.shares;
    c.at = c.begin + options_.share * (samples / options_.shares) +
           std::min<int64_t>(options_.share, larger);
    c.stop = c.at + share_of(samples);
    return c;
  }

  int64_t share_of(int64_t samples) const {
    return samples / options_.shares +
           (options_.share < samples % options_.shares ? 1 : 0);
  }

  int64_t batches_in(int64_t window) const {
    return batches_of(share_of(window));
  }

  int64_t batch_samples(const Cursor& from) const {
    return std::min(options_.batch, from.stop - from.at);
  }

  /// Of the samples from `begin` to `end` in the epoch's order.
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

  /// The order of an epoch; nothing where samples come as they lie.
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
      batch.inputs = batch.inputs.pin_memory();
      batch.targets = batch.targets.pin_memory();
    }
    return batch;
  }

  void work() {
    compat::run_operators_on_this_thread();
    std::unique_lock lock(mutex_);
    while (true) {
      room_.wait(lock, [this] {
        return stop_ || given_ - taken_ < static_cast<int64_t>(places_.size());
      });
      if (stop_) return;
      Place& place = place_of(given_++);
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
      place.batch = std::move(batch);
      place.error = std::move(error);
      place.ready = true;
      ready_.notify_one();
    }
  }

  Batch take() {
    std::unique_lock lock(mutex_);
    Place& place = place_of(taken_);
    if (!place.ready) {
      const auto start = std::chrono::steady_clock::now();
      ready_.wait(lock, [&place] { return place.ready; });
      waited_s_ += seconds_since(start);
    }
    // It stays in its place: what cannot be read is never skipped.
    if (place.error) std::rethrow_exception(place.error);
    Batch batch = std::exchange(place.batch, {});
    place.ready = false;
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

  Place& place_of(int64_t number) {
    return places_[static_cast<size_t>(number) % places_.size()];
  }

  const std::shared_ptr<const Dataset> dataset_;
  const LoaderOptions options_;
  int64_t size_ = 0;

  // The caller's.
  Cursor cursor_;
  double waited_s_ = 0;

  // Making an order takes a while with many samples; others go on meanwhile.
  std::mutex orders_mutex_;
  std::map<int64_t, Order> orders_;

  std::mutex mutex_;  // for all below
  std::condition_variable room_, ready_;
  std::vector<Place> places_;
  Cursor planned_;                 // where the next number begins
  int64_t given_ = 0, taken_ = 0;  // numbers, to workers and by the caller
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

void Loader::pass_window() {
  impl_->pass_window();
}

bool Loader::epoch_ends() const {
  return impl_->epoch_ends();
}

double Loader::waited_s() const {
  return impl_->waited_s();
}

}  // namespace reprise
