#include "splitmix.h"

#include <reprise/data/loader.h>
#include <reprise/torch/threads.h>

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
      : dataset_(std::move(dataset)),
        options_(std::move(options)),
        position_(position),
        planned_(position) {
    TORCH_CHECK(dataset_ != nullptr && dataset_->size() > 0,
                "[loader] expected a dataset with samples, got none");
    size_ = dataset_->size();
    TORCH_CHECK(options_.batch > 0, "[loader] expected a batch above 0, got ",
                options_.batch);
    TORCH_CHECK(options_.window >= 0,
                "[loader] expected a window of at least 0, got ",
                options_.window);
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
    if (position_.sample == size_) {
      position_ = {position_.epoch + 1, 0};
      forget_orders();
      return std::nullopt;
    }
    Batch batch = options_.workers > 0 ? take() : read_here();
    position_.sample += batch_samples(position_);
    return batch;
  }

  LoaderPosition position() const { return position_; }

  int64_t batches_left() const {
    const int64_t left = size_ - position_.sample;
    if (options_.window == 0) return batches_of(left);
    const int64_t here = std::min(left, window_left(position_));
    const int64_t whole = (left - here) / options_.window;
    const int64_t last = (left - here) % options_.window;
    return batches_of(here) + whole * batches_of(options_.window) +
           batches_of(last);
  }

  int64_t count_ahead(int64_t batches) {
    LoaderPosition end = position_;
    for (; batches > 0 && end.sample < size_; --batches) {
      end.sample += batch_samples(end);
    }
    const Order order = order_of(position_.epoch);
    int64_t count = 0;
    for (int64_t i = position_.sample; i < end.sample; ++i) {
      count += dataset_->count(order ? (*order)[static_cast<size_t>(i)] : i);
    }
    return count;
  }

  double waited_s() const { return waited_s_; }

 private:
  struct Place {
    bool ready = false;
    Batch batch;
    std::exception_ptr error;
  };

  int64_t batch_samples(const LoaderPosition& from) const {
    const int64_t most = std::min(options_.batch, size_ - from.sample);
    return options_.window > 0 ? std::min(most, window_left(from)) : most;
  }

  /// Samples from `from` to its window's end, as if the epoch did not end.
  int64_t window_left(const LoaderPosition& from) const {
    return options_.window - from.sample % options_.window;
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
    orders_.erase(orders_.begin(), orders_.lower_bound(position_.epoch));
  }

  Batch read(const LoaderPosition& from) {
    const torch::NoGradGuard no_grad;
    std::vector<int64_t> indices(static_cast<size_t>(batch_samples(from)));
    std::iota(indices.begin(), indices.end(), from.sample);
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
      if (planned_.sample == size_) planned_ = {planned_.epoch + 1, 0};
      const LoaderPosition from = planned_;
      planned_.sample += batch_samples(planned_);

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
    Batch batch = read(position_);
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
  LoaderPosition position_;
  double waited_s_ = 0;

  // Making an order takes a while with many samples; others go on meanwhile.
  std::mutex orders_mutex_;
  std::map<int64_t, Order> orders_;

  std::mutex mutex_;  // for all below
  std::condition_variable room_, ready_;
  std::vector<Place> places_;
  LoaderPosition planned_;         // where the next number begins
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

double Loader::waited_s() const {
  return impl_->waited_s();
}

}  // namespace reprise
