#include "distributed/failure_detector.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace reprise {
namespace {

using std::chrono::milliseconds;

int64_t ticks() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

std::chrono::steady_clock::duration since(int64_t then) {
  return std::chrono::steady_clock::duration(ticks() - then);
}

}  // namespace

FailureDetector::Waiting::Waiting(FailureDetector* watch) : watch_(watch) {
  if (watch_ != nullptr) ++watch_->waiting_;
}

FailureDetector::Waiting::~Waiting() {
  if (watch_ == nullptr) return;
  if (watch_->stepped_ != 0) watch_->stepped_ = ticks();
  --watch_->waiting_;
}

FailureDetector::FailureDetector(Options options)
    : options_(std::move(options)),
      period_(std::clamp(
          milliseconds(static_cast<int64_t>(1000 * options_.timeout_s / 16)),
          milliseconds(20), milliseconds(1000))),
      timeout_(std::chrono::duration_cast<Clock::duration>(
          std::chrono::duration<double>(options_.timeout_s))),
      // So that all have ended when the time-out is over: a last beat may be seen a
      // period late, its absence another, and the others learn of it within a third.
      silence_(timeout_ - 7 * period_ / 2),
      store_(std::make_unique<compat::Store>(options_.store)),
      seen_(static_cast<size_t>(options_.ranks)) {
  for (Seen& seen : seen_) seen.since = Clock::now();
  answered_ = ticks();
  beating_ = std::thread([this] { beat(); });
  guarding_ = std::thread([this] { guard(); });
}

FailureDetector::~FailureDetector() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  beating_.join();
  guarding_.join();
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

void FailureDetector::beat() {
  bool lost = false;
  while (sleep(period_) && !told_) {
    try {
      look(*store_);
      answered_ = ticks();
    } catch (const std::exception&) {
      // Its holder is gone, unless this rank is at its end as well.
      if (lost && !failing_) {
        found(nullptr, options_.holder + " is gone");
        return;
      }
      lost = true;
    }
  }
}

void FailureDetector::look(compat::Store& store) {
  store.add(key(fmt::format("beat/{}", options_.rank)), 1);
  if (const auto fault = store.find(key("fault")); fault && !failing_) {
    found(&store, *fault);
    return;
  }
  const int64_t stepped = stepped_;
  if (stepped != 0 && waiting_ == 0 && since(stepped) > timeout_) {
    found(&store, fmt::format("rank {} has made no step for {:g} s",
                              options_.rank, options_.timeout_s));
    return;
  }
  const auto limit =
      suspected_ ? std::min<Clock::duration>(
                       silence_, std::max<Clock::duration>(
                                     5 * period_, std::chrono::seconds(2)))
                 : silence_;
  for (int other = 0; other < options_.ranks; ++other) {
    if (other == options_.rank) continue;
    Seen& seen = seen_[static_cast<size_t>(other)];
    const int64_t beats = store.add(key(fmt::format("beat/{}", other)), 0);
    const auto now = Clock::now();
    if (beats != seen.beats) {
      seen = {beats, now};
    } else if (now - seen.since > limit) {
      if (store.find(key(fmt::format("left/{}", other)))) continue;
      found(
          &store,
          fmt::format("rank {} has not answered for {:.1f} s", other,
                      std::chrono::duration<double>(now - seen.since).count()),
          /*gone=*/true);
      return;
    }
  }
}

void FailureDetector::guard() {
  while (sleep(period_) && !told_) {
    if (since(answered_) > silence_ && !failing_) {
      found(nullptr,
            fmt::format("{} has not answered for {:.1f} s", options_.holder,
                        std::chrono::duration<double>(silence_).count()));
    }
  }
}

void FailureDetector::found(compat::Store* store, const std::string& what,
                            bool gone) {
  if (told_.exchange(true)) return;
  if (store != nullptr) {
    try {
      tell(*store, what, options_.holds_store ? 2 : 0, gone);
    } catch (const std::exception&) {
    }
  }
  options_.on_fault(what);
}

void FailureDetector::tell(compat::Store& store, const std::string& what,
                           double wait_s, bool gone) {
  int64_t read = 1;
  if (store.add(key("faults"), 1) == 1) {
    if (gone) ++read;  // for it, once
    store.set(key("fault"), what);
  }
  // All but the one that is gone read it; what holds the store ends last.
  const auto until =
      Clock::now() +
      std::min<Clock::duration>(
          timeout_, std::chrono::milliseconds(int64_t(1000 * wait_s)));
  read = store.add(key("read"), read);
  while (read < options_.ranks && Clock::now() < until) {
    std::this_thread::sleep_for(period_ / 2);
    read = store.add(key("read"), 0);
  }
}

void FailureDetector::suspect() {
  suspected_ = true;
  const Waiting waiting(this);
  const auto until = Clock::now() + timeout_ + 3 * period_;
  while (Clock::now() < until && !told_) {
    std::this_thread::sleep_for(period_);
  }
}

void FailureDetector::fail(const std::string& what) noexcept {
  if (failing_.exchange(true) || told_) return;
  try {
    tell(*store_, what, 5);
  } catch (const std::exception&) {
  }
}

void FailureDetector::leave() {
  pause_watchdog();
  store_->set(key(fmt::format("left/{}", options_.rank)), "");
  const Waiting waiting(this);
  if (store_->add(key("left"), 1) == options_.ranks) {
    store_->set(key("all-left"), "");
  }
  while (!told_ && !store_->find(key("all-left"))) {
    std::this_thread::sleep_for(milliseconds(2));
  }
  failing_ = true;  // what breaks from now on is nobody's fault
  // Whoever holds the store goes last.
  store_->add(key("gone"), 1);
  if (!options_.holds_store) return;
  const auto until = Clock::now() + timeout_;
  while (Clock::now() < until && store_->add(key("gone"), 0) < options_.ranks) {
    std::this_thread::sleep_for(milliseconds(2));
  }
}

}  // namespace reprise
