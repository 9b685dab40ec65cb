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

/// The driver may deliver its utilisation samples only once per second, with a sampling
/// period of 1/6 s. The sample in progress at the end of the training arrives within
/// the sum of both.
constexpr auto kMaxPendingWait = std::chrono::milliseconds(1200);
constexpr auto kPollInterval = std::chrono::milliseconds(30);

/// Below the priority of the training. SCHED_IDLE would starve the thread while the
/// training uses every core, so that only idle times were sampled.
constexpr int kObserverNice = 10;

void configure_observer_thread() {
  pthread_setname_np(pthread_self(), "reprise-observe");
  // On Linux, nice values are per thread. Errors are ignored.
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)),
              kObserverNice);
}

}  // namespace

struct Observer::Impl {
  enum class State { kNotStarted, kTraining, kPaused, kEnded };

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

  std::mutex mutex;  // guards the probe and all members below
  std::condition_variable changed;
  State state = State::kNotStarted;
  Recording recording;
  Clock::time_point interval_start, next;
  double seconds_before = 0;  // training time of the previous intervals
  double last_s = 0;          // training time of the last sample
  double thread_cpu_s = 0;    // CPU time of the observer thread
  double sample_cpu_s = 0;    // CPU time of its last sample
  double edge_cpu_s = 0;      // CPU time of samples at the ends of intervals

  double training_seconds(Clock::time_point now) const {
    return seconds_before + (state == State::kTraining
                                 ? Seconds(now - interval_start).count()
                                 : 0);
  }

  void take_sample(double t_s) {
    last_s = std::max(last_s, t_s);
    DeviceSample sample;
    try {
      sample = probe->sample();
    } catch (const std::exception&) {
      // A failing probe must not end the training.
    }
    recording.add(last_s, sample);
  }

  /// Runs `body` on the caller's thread and counts its CPU time.
  template <class Body>
  void at_edge(Body&& body) {
    const double before = detail::cpu_seconds(CLOCK_THREAD_CPUTIME_ID);
    body();
    edge_cpu_s += detail::cpu_seconds(CLOCK_THREAD_CPUTIME_ID) - before;
  }

  void start_interval() {
    at_edge([this] {
      probe->restart();
      take_sample(seconds_before);
    });
    state = State::kTraining;
    interval_start = Clock::now();
    next = interval_start + interval;
  }

  /// `now` was taken before the mutex was locked: waiting and sampling are not training
  /// time.
  void end_interval(State to, Clock::time_point now) {
    at_edge([this, now] {
      probe->stop();
      take_sample(training_seconds(now));
    });
    seconds_before = last_s;
    state = to;
  }

  void observe() {
    configure_observer_thread();
    std::unique_lock lock(mutex);
    while (state != State::kEnded) {
      if (state == State::kPaused) {
        changed.wait(lock);
        continue;
      }
      // Absolute times, so that the duration of a sample does not add to the interval.
      if (changed.wait_until(lock, next) == std::cv_status::no_timeout) {
        continue;
      }
      const auto now = Clock::now();
      if (state != State::kTraining || now < next) continue;
      const double t_s = training_seconds(now);
      // The next sample is assumed to cost as much as the last one.
      if (thread_cpu_s + edge_cpu_s + sample_cpu_s <= options.max_cost * t_s) {
        take_sample(t_s);
        sample_cpu_s =
            detail::cpu_seconds(CLOCK_THREAD_CPUTIME_ID) - thread_cpu_s;
      }
      // Missed samples are skipped.
      next += interval * ((Clock::now() - next) / interval + 1);
      thread_cpu_s = detail::cpu_seconds(CLOCK_THREAD_CPUTIME_ID);
    }
    thread_cpu_s = detail::cpu_seconds(CLOCK_THREAD_CPUTIME_ID);
  }

  void start_thread() {
    // The thread starts with all signals blocked, so that the training receives them.
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

  /// Waits for delayed values. Counts neither as training time nor as cost.
  void wait_for_pending() {
    try {
      const auto until = Clock::now() + kMaxPendingWait;
      while (probe->has_pending() && Clock::now() < until) {
        std::this_thread::sleep_for(kPollInterval);
      }
      for (const PastUtilisation& past : probe->take_pending())
        recording.add(past);
    } catch (const std::exception&) {
      // See take_sample().
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
    impl_->state = Impl::State::kEnded;
  }
  impl_->stop_thread();
}

void Observer::take_baseline() {
  const std::lock_guard lock(impl_->mutex);
  TORCH_CHECK(impl_->state == Impl::State::kNotStarted,
              "[observer] the baseline must be taken before begin()");
  std::vector<int64_t> samples;
  for (int i = 0; i < kBaselineSamples; ++i) {
    if (i > 0) std::this_thread::sleep_for(kBaselinePause);
    const auto bytes = impl_->probe->sample().memory_bytes;
    if (bytes) samples.push_back(*bytes);
  }
  impl_->baseline.reset();
  if (!samples.empty()) {
    std::sort(samples.begin(), samples.end());
    impl_->baseline = samples[samples.size() / 2];
  }
}

void Observer::begin() {
  {
    const std::lock_guard lock(impl_->mutex);
    TORCH_CHECK(impl_->state == Impl::State::kNotStarted,
                "[observer] expected begin() once; an observer is for one run");
    impl_->recording = Recording(impl_->baseline);
    impl_->start_interval();
  }
  impl_->start_thread();
}

bool Observer::pause() {
  const auto now = Clock::now();
  const std::lock_guard lock(impl_->mutex);
  if (impl_->state != Impl::State::kTraining) return false;
  impl_->end_interval(Impl::State::kPaused, now);
  impl_->changed.notify_all();
  return true;
}

bool Observer::resume() {
  const std::lock_guard lock(impl_->mutex);
  if (impl_->state != Impl::State::kPaused) return false;
  impl_->start_interval();
  impl_->changed.notify_all();
  return true;
}

Observation Observer::end() {
  const auto now = Clock::now();
  {
    const std::lock_guard lock(impl_->mutex);
    TORCH_CHECK(impl_->state != Impl::State::kNotStarted,
                "[observer] expected begin() before end()");
    if (impl_->state == Impl::State::kEnded) return impl_->result;
    if (impl_->state == Impl::State::kTraining) {
      impl_->end_interval(Impl::State::kEnded, now);
    }
    impl_->state = Impl::State::kEnded;
  }
  impl_->stop_thread();
  impl_->wait_for_pending();
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
