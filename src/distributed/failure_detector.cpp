#include "distributed/failure_detector.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace reprise::detail {
namespace {

using std::chrono::milliseconds;

int64_t ticks() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

std::chrono::steady_clock::duration since(int64_t then) {
  return std::chrono::steady_clock::duration(ticks() - then);
}

}  // namespace

FailureDetector::Waiting::Waiting(FailureDetector* detector)
    : detector_(detector) {
  if (detector_ != nullptr) ++detector_->waiting_;
}

FailureDetector::Waiting::~Waiting() {
  if (detector_ == nullptr) return;
  if (detector_->stepped_ != 0) detector_->stepped_ = ticks();
  --detector_->waiting_;
}

FailureDetector::FailureDetector(Options options)
    : options_(std::move(options)),
      period_(std::clamp(
          milliseconds(static_cast<int64_t>(1000 * options_.timeout_s / 16)),
          milliseconds(20), milliseconds(1000))),
      timeout_(std::chrono::duration_cast<Clock::duration>(
          std::chrono::duration<double>(options_.timeout_s))),
      // All ranks must have ended when the time-out is over: a heartbeat may be read
      // one period late, its absence one more, and the other ranks learn of it one
      // later.
      silence_(timeout_ - 7 * period_ / 2),
      store_(options_.store),
      heartbeats_(static_cast<size_t>(options_.world_size)) {
  for (Heartbeats& beats : heartbeats_) beats.changed = Clock::now();
  answered_ = ticks();
  heartbeat_thread_ = std::thread([this] { run_heartbeat_thread(); });
  store_watch_thread_ = std::thread([this] { run_store_watch_thread(); });
}

FailureDetector::~FailureDetector() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  heartbeat_thread_.join();
  store_watch_thread_.join();
}

void FailureDetector::heartbeat() {
  stepped_ = ticks();
}

void FailureDetector::pause_watchdog() {
  stepped_ = 0;
}

bool FailureDetector::sleep(milliseconds time) {
  std::unique_lock lock(mutex_);
  return !wake_.wait_for(lock, time, [this] { return stop_; });
}

void FailureDetector::run_heartbeat_thread() {
  bool lost = false;
  while (sleep(period_) && !reported_) {
    try {
      check_ranks(*store_);
      answered_ = ticks();
    } catch (const std::exception&) {
      // The process that serves the store is dead, unless this rank is failing too.
      if (lost && !failing_) {
        report(nullptr, options_.holder + " is gone");
        return;
      }
      lost = true;
    }
  }
}

void FailureDetector::check_ranks(compat::KeyValueStore& store) {
  store.add(key(fmt::format("beat/{}", options_.rank)), 1);
  if (const auto fault = store.get(key("fault")); fault && !failing_) {
    report(&store, *fault);
    return;
  }
  const int64_t stepped = stepped_;
  if (stepped != 0 && waiting_ == 0 && since(stepped) > timeout_) {
    report(&store, fmt::format("rank {} has made no progress for {:g} s",
                               options_.rank, options_.timeout_s));
    return;
  }
  const auto limit =
      suspected_ ? std::min<Clock::duration>(
                       silence_, std::max<Clock::duration>(
                                     5 * period_, std::chrono::seconds(2)))
                 : silence_;
  for (int other = 0; other < options_.world_size; ++other) {
    if (other == options_.rank) continue;
    Heartbeats& last = heartbeats_[static_cast<size_t>(other)];
    const int64_t count = store.add(key(fmt::format("beat/{}", other)), 0);
    const auto now = Clock::now();
    if (count != last.count) {
      last = {count, now};
    } else if (now - last.changed > limit) {
      if (store.get(key(fmt::format("left/{}", other)))) continue;
      report(&store,
             fmt::format(
                 "rank {} has not answered for {:.1f} s", other,
                 std::chrono::duration<double>(now - last.changed).count()),
             /*dead=*/true);
      return;
    }
  }
}

void FailureDetector::run_store_watch_thread() {
  while (sleep(period_) && !reported_) {
    if (since(answered_) > silence_ && !failing_) {
      report(nullptr,
             fmt::format("{} has not answered for {:.1f} s", options_.holder,
                         std::chrono::duration<double>(silence_).count()));
    }
  }
}

void FailureDetector::report(compat::KeyValueStore* store,
                             const std::string& what, bool dead) {
  if (reported_.exchange(true)) return;
  if (store != nullptr) {
    try {
      publish(*store, what, options_.holds_store ? 2 : 0, dead);
    } catch (const std::exception&) {
    }
  }
  options_.on_fault(what);
}

void FailureDetector::publish(compat::KeyValueStore& store,
                              const std::string& what, double wait_s,
                              bool dead) {
  int64_t read = 1;
  if (store.add(key("faults"), 1) == 1) {
    if (dead) ++read;  // acknowledged on behalf of the dead rank
    store.set(key("fault"), what);
  }
  // The process that serves the store must outlive the ranks that read the fault.
  const auto until =
      Clock::now() +
      std::min<Clock::duration>(
          timeout_, std::chrono::milliseconds(int64_t(1000 * wait_s)));
  read = store.add(key("read"), read);
  while (read < options_.world_size && Clock::now() < until) {
    std::this_thread::sleep_for(period_ / 2);
    read = store.add(key("read"), 0);
  }
}

void FailureDetector::suspect() {
  suspected_ = true;
  const Waiting waiting(this);
  const auto until = Clock::now() + timeout_ + 3 * period_;
  while (Clock::now() < until && !reported_) {
    std::this_thread::sleep_for(period_);
  }
}

void FailureDetector::fail(const std::string& what) noexcept {
  if (failing_.exchange(true) || reported_) return;
  try {
    publish(*store_, what, 5);
  } catch (const std::exception&) {
  }
}

void FailureDetector::leave() {
  pause_watchdog();
  store_->set(key(fmt::format("left/{}", options_.rank)), "");
  const Waiting waiting(this);
  if (store_->add(key("left"), 1) == options_.world_size) {
    store_->set(key("all-left"), "");
  }
  while (!reported_ && !store_->get(key("all-left"))) {
    std::this_thread::sleep_for(milliseconds(2));
  }
  failing_ = true;  // broken connections are expected from now on
  // The rank that serves the store leaves last.
  store_->add(key("gone"), 1);
  if (!options_.holds_store) return;
  const auto until = Clock::now() + timeout_;
  while (Clock::now() < until &&
         store_->add(key("gone"), 0) < options_.world_size) {
    std::this_thread::sleep_for(milliseconds(2));
  }
}

}  // namespace reprise::detail
