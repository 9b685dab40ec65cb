#pragma once

#include "compat/key_value_store.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace reprise::detail {

/// Detects ranks that are dead, stopped or stuck, and then calls on_fault.
///
/// Each rank increments a counter in the store several times per time-out and
/// reads the counters of the other ranks. A rank whose counter has not changed
/// for the time-out is considered dead. A background thread with its own
/// connection does this. A second thread watches the first one, which blocks if
/// the process that serves the store stops. A rank that makes no progress for the
/// time-out reports itself. The first rank that detects a fault writes it to the
/// store for all others. Tested by tests/distributed/group_test.cpp and
/// faults_test.cpp.
class FailureDetector {
 public:
  struct Options {
    /// A connection of its own.
    std::shared_ptr<compat::KeyValueStore> store;
    std::string prefix;        ///< of all keys in the store
    std::string holder;        ///< who serves the store, for messages
    bool holds_store = false;  ///< whether this rank serves the store
    int rank = 0;
    int world_size = 1;
    double timeout_s = 60;
    /// Called once, on a background thread, with a description of the fault.
    std::function<void(const std::string&)> on_fault;
  };

  explicit FailureDetector(Options options);
  ~FailureDetector();
  FailureDetector(const FailureDetector&) = delete;
  FailureDetector& operator=(const FailureDetector&) = delete;

  /// Reports progress and starts the watchdog of this rank.
  void heartbeat();
  /// Stops the watchdog until the next heartbeat().
  void pause_watchdog();

  /// Suspends the watchdog of this rank while it waits for other ranks. A null
  /// detector is allowed.
  class Waiting {
   public:
    explicit Waiting(FailureDetector* detector);
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    FailureDetector* detector_;
  };

  /// To be called when a connection has broken: shortens the time after which an
  /// unchanged counter is a fault. Returns after at most the time-out, unless
  /// on_fault ends the process.
  void suspect();

  /// Tells all other ranks that this rank fails, and waits up to 5 s for them to
  /// read it.
  void fail(const std::string& what) noexcept;

  /// Waits until all ranks have called leave(). No fault is reported afterwards.
  void leave();

 private:
  using Clock = std::chrono::steady_clock;
  struct Heartbeats {
    int64_t count = -1;
    Clock::time_point changed{};
  };

  void run_heartbeat_thread();
  void run_store_watch_thread();
  void check_ranks(compat::KeyValueStore& store);
  /// Publishes the fault and calls on_fault. `dead`: the fault is a rank that
  /// cannot acknowledge it.
  void report(compat::KeyValueStore* store, const std::string& what,
              bool dead = false);
  /// Writes the fault to the store and waits up to `wait_s` for all ranks to
  /// acknowledge it.
  void publish(compat::KeyValueStore& store, const std::string& what,
               double wait_s, bool dead = false);
  /// Returns false if the detector is being destroyed.
  bool sleep(std::chrono::milliseconds time);
  std::string key(const std::string& name) const {
    return options_.prefix + name;
  }

  Options options_;
  std::chrono::milliseconds period_;
  Clock::duration timeout_;
  Clock::duration silence_;  // without a heartbeat, after which a rank is dead
  std::shared_ptr<compat::KeyValueStore> store_;
  std::vector<Heartbeats> heartbeats_;  // of each rank, as last read

  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::atomic<bool> failing_ = false;   // this rank has reported itself
  std::atomic<bool> reported_ = false;  // on_fault was called
  std::atomic<bool> suspected_ = false;
  std::atomic<int> waiting_ = 0;
  std::atomic<int64_t> stepped_ =
      0;  // ticks of the last heartbeat(); 0: paused
  std::atomic<int64_t> answered_ = 0;  // ticks of the last reply from the store
  std::thread heartbeat_thread_, store_watch_thread_;
};

}  // namespace reprise::detail
