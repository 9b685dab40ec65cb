#include "observe/clocks.h"

#include <reprise/observe/observer.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace reprise {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr int kBaselineSamples = 5;
constexpr auto kBaselinePause = std::chrono::milliseconds(2);

/// A driver that measures by itself may tell of it once a second only, in
/// samples of a sixth of a second: the one that is under way at the end of the
/// training is told of within the sum of both. Longer than that is not waited.
constexpr auto kLongestWait = std::chrono::milliseconds(1200);
constexpr auto kWaitStep = std::chrono::milliseconds(30);

/// The training wins where both want a core. Not SCHED_IDLE: it would not run at
/// all while the training has every core, and see the quiet moments only.
constexpr int kObserverNice = 10;

void settle_observer_thread() {
  pthread_setname_np(pthread_self(), "reprise-observe");
  // On Linux nice is a thread's own. Failing does not matter.
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)),
              kObserverNice);
}

}  // namespace

struct Observer::Impl {
  enum class State { kBefore, kTraining, kAside, kOver };

  Impl(std::unique_ptr<DeviceProbe> the_probe, ObserverOptions the_options)
      : probe(std::move(the_probe)),
        options(the_options),
        interval(std::chrono::duration_cast<Clock::duration>(
            Seconds(the_options.interval_ms / 1000))) {}

  std::unique_ptr<DeviceProbe> probe;
  const ObserverOptions options;
  const Clock::duration interval;
  std::optional<int64_t> baseline;
  Observation result;
  std::thread thread;

  std::mutex mutex;  // of everything below, and of the probe
  std::condition_variable changed;
  State state = State::kBefore;
  Recording recording;
  Clock::time_point part_start, next;
  double seconds_before = 0;  // in parts that are over
  double last_s = 0;          // of the last look
  double thread_cpu_s = 0;    // of the observing thread
  double look_cpu_s = 0;      // of its last look
  double edge_cpu_s = 0;      // of looks at the ends of parts

  double training_seconds(Clock::time_point now) const {
    return seconds_before +
           (state == State::kTraining ? Seconds(now - part_start).count() : 0);
  }

  void look(double t_s) {
    last_s = std::max(last_s, t_s);
    DeviceSample sample;
    try {
      sample = probe->sample();
    } catch (const std::exception&) {
      // A probe that fails shows nothing; the training must not end for it.
    }
    recording.add(last_s, sample);
  }

  /// On the caller's thread, which waits for it.
  template <class Body>
  void at_edge(Body&& body) {
    const double before = detail::cpu_seconds(CLOCK_THREAD_CPUTIME_ID);
    body();
    edge_cpu_s += detail::cpu_seconds(CLOCK_THREAD_CPUTIME_ID) - before;
  }

  void start_part() {
    at_edge([this] {
      probe->restart();
      look(seconds_before);
    });
    state = State::kTraining;
    part_start = Clock::now();
    next = part_start + interval;
  }

  /// `now`: from before the mutex was waited for. Waiting and looking are not
  /// the training's time.
  void end_part(State to, Clock::time_point now) {
    at_edge([this, now] {
      probe->stop();
      look(training_seconds(now));
    });
    seconds_before = last_s;
    state = to;
  }

  void observe() {
    settle_observer_thread();
    std::unique_lock lock(mutex);
    while (state != State::kOver) {
      if (state == State::kAside) {
        changed.wait(lock);
        continue;
      }
      // Absolute times: what a look takes does not add to the interval.
      if (changed.wait_until(lock, next) == std::cv_status::no_timeout) {
        continue;
      }
      const auto now = Clock::now();
      if (state != State::kTraining || now < next) continue;
      const double t_s = training_seconds(now);
      // The next look will cost what the last one did.
      if (thread_cpu_s + edge_cpu_s + look_cpu_s <= options.max_cost * t_s) {
        look(t_s);
        look_cpu_s =
            detail::cpu_seconds(CLOCK_THREAD_CPUTIME_ID) - thread_cpu_s;
      }
      // Times that were missed are left out, not made up for.
      next += interval * ((Clock::now() - next) / interval + 1);
      thread_cpu_s = detail::cpu_seconds(CLOCK_THREAD_CPUTIME_ID);
    }
    thread_cpu_s = detail::cpu_seconds(CLOCK_THREAD_CPUTIME_ID);
  }

  void start_thread() {
    // Signals are the training's: the thread starts with all of them blocked.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    try {
      thread = std::thread([this] { observe(); });
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  /// What the device tells of the training after it. Not the training's time,
  /// nor its cost.
  void wait_for_rest() {
    try {
      const auto until = Clock::now() + kLongestWait;
      while (probe->more_to_come() && Clock::now() < until) {
        std::this_thread::sleep_for(kWaitStep);
      }
      for (const PastUtilisation& past : probe->rest()) recording.add(past);
    } catch (const std::exception&) {
      // As in look().
    }
  }

  void stop_thread() {
    changed.notify_all();
    if (thread.joinable()) thread.join();
  }
};

Observer::Observer(const std::string& device, ObserverOptions options)
    : Observer(make_probe(device), options) {}

Observer::Observer(std::unique_ptr<DeviceProbe> probe,
                   ObserverOptions options) {
  TORCH_CHECK(probe != nullptr, "[observer] expected a probe, got null");
  TORCH_CHECK(options.interval_ms >= 1 && options.interval_ms <= 3.6e6,
              "[observer] expected an interval from 1 ms to an hour, got ",
              options.interval_ms, " ms");
  impl_ = std::make_unique<Impl>(std::move(probe), options);
  take_baseline();
}

Observer::~Observer() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->state = Impl::State::kOver;
  }
  impl_->stop_thread();
}

void Observer::take_baseline() {
  const std::lock_guard lock(impl_->mutex);
  TORCH_CHECK(impl_->state == Impl::State::kBefore,
              "[observer] the baseline is taken before begin()");
  std::vector<int64_t> seen;
  for (int i = 0; i < kBaselineSamples; ++i) {
    if (i > 0) std::this_thread::sleep_for(kBaselinePause);
    const auto bytes = impl_->probe->sample().memory_bytes;
    if (bytes) seen.push_back(*bytes);
  }
  impl_->baseline.reset();
  if (!seen.empty()) {
    std::sort(seen.begin(), seen.end());
    impl_->baseline = seen[seen.size() / 2];
  }
}

void Observer::begin() {
  {
    const std::lock_guard lock(impl_->mutex);
    TORCH_CHECK(impl_->state == Impl::State::kBefore,
                "[observer] expected begin() once; an observer is for one run");
    impl_->recording = Recording(impl_->baseline);
    impl_->start_part();
  }
  impl_->start_thread();
}

bool Observer::pause() {
  const auto now = Clock::now();
  const std::lock_guard lock(impl_->mutex);
  if (impl_->state != Impl::State::kTraining) return false;
  impl_->end_part(Impl::State::kAside, now);
  impl_->changed.notify_all();
  return true;
}

bool Observer::resume() {
  const std::lock_guard lock(impl_->mutex);
  if (impl_->state != Impl::State::kAside) return false;
  impl_->start_part();
  impl_->changed.notify_all();
  return true;
}

Observation Observer::end() {
  const auto now = Clock::now();
  {
    const std::lock_guard lock(impl_->mutex);
    TORCH_CHECK(impl_->state != Impl::State::kBefore,
                "[observer] expected begin() before end()");
    if (impl_->state == Impl::State::kOver) return impl_->result;
    if (impl_->state == Impl::State::kTraining) {
      impl_->end_part(Impl::State::kOver, now);
    }
    impl_->state = Impl::State::kOver;
  }
  impl_->stop_thread();
  impl_->wait_for_rest();
  Observation& result = impl_->result;
  result.source = impl_->probe->source();
  result.interval_ms = impl_->options.interval_ms;
  result.seconds = impl_->seconds_before;
  const double cpu_s = impl_->thread_cpu_s + impl_->edge_cpu_s;
  result.cost = result.seconds > 0 ? cpu_s / result.seconds : 0;
  impl_->recording.write_to(result);
  return result;
}

}  // namespace reprise
