#pragma once

#include "compat/process_group.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace reprise {

/// Finds ranks that are dead, stopped or stuck, and ends this process then.
///
/// Each rank adds to a counter of its own in the store, a few times within the
/// time-out, and reads those of the others: one that stands still for the time-out
/// belongs to a rank that is gone. A thread of its own does that, on a connection of
/// its own. A second thread looks at the first, which stands still where the one who
/// holds the store does. A rank whose work makes no step for as long says so itself.
/// Whoever finds something first writes it to the store for all.
class FailureDetector {
 public:
  struct Options {
    compat::Store::Options store;  ///< to connect to
    std::string prefix;
    std::string holder;        ///< of the store, for people
    bool holds_store = false;  ///< this rank does
    int rank = 0;
    int ranks = 1;
    double timeout_s = 60;
    /// Called once, on a thread of the watch, with what is wrong.
    std::function<void(const std::string&)> on_fault;
  };

  explicit FailureDetector(Options options);
  ~FailureDetector();
  FailureDetector(const FailureDetector&) = delete;
  FailureDetector& operator=(const FailureDetector&) = delete;

  /// The work has come one step further; from now on it must go on doing so.
  void heartbeat();
  /// No steps are expected until the next one.
  void pause_watchdog();

  /// While it lives, this rank waits for others, or does something that takes
  /// however long it takes.
  class Waiting {
   public:
    explicit Waiting(FailureDetector* watch);
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    FailureDetector* watch_;
  };

  /// A connection broke: a rank whose counter stands still is found sooner now.
  /// Returns after the time that takes at most, unless on_fault ended the process.
  void suspect();

  /// Tells all others that this rank fails, and waits a moment for them to read it.
  void fail(const std::string& what) noexcept;

  /// No rank is found dead from now on. Waits until all have come here.
  void leave();

 private:
  using Clock = std::chrono::steady_clock;
  struct Seen {
    int64_t beats = -1;
    Clock::time_point since{};
  };

  void beat();
  void guard();
  void look(compat::Store& store);
  /// `gone`: a rank that will not read it.
  void found(compat::Store* store, const std::string& what, bool gone = false);
  /// To all, and waits so long at most for them to have read it.
  void tell(compat::Store& store, const std::string& what, double wait_s,
            bool gone = false);
  bool sleep(std::chrono::milliseconds time);
  std::string key(const std::string& name) const {
    return options_.prefix + name;
  }

  Options options_;
  std::chrono::milliseconds period_;
  Clock::duration timeout_;
  Clock::duration silence_;  // after which another one is gone
  std::unique_ptr<compat::Store> store_;
  std::vector<Seen> seen_;

  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::atomic<bool> failing_ = false;  // this rank says so itself
  std::atomic<bool> told_ = false;     // on_fault was called
  std::atomic<bool> suspected_ = false;
  std::atomic<int> waiting_ = 0;
  std::atomic<int64_t> stepped_ = 0;   // ticks; 0: at rest
  std::atomic<int64_t> answered_ = 0;  // ticks of the last answer of the store
  std::thread beating_, guarding_;
};

}  // namespace reprise
