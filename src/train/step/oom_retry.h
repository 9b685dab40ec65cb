#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>

namespace reprise::detail {

/// Runs `body` and returns the message of an allocation failure in it, if there was one.
/// Other errors propagate, std::bad_alloc included: it may occur between two writes of an
/// update.
std::optional<std::string> out_of_memory_in(const std::function<void()>& body);

/// Thrown after kMaxFailures allocation failures in a row.
class RetriesExhausted : public c10::Error {
  using Error::Error;
};

/// Thrown in an attempt that cannot be finished because another rank's has failed.
class FailedOnAnotherRank : public std::exception {};

/// Repeats work in which an allocation failed. Used for windows, evaluations, saves and
/// the parts of an update; with several ranks all of them repeat a window together.
class OomRetry {
 public:
  using Warn = std::function<void(const std::string&)>;

  static constexpr int kMaxFailures = 8;

  /// `release` is called after each failure, to free memory that can be spared.
  OomRetry(
      c10::Device device, Warn warn, std::function<void()> release = [] {});

  struct Recovery {
    /// Frees what a failed attempt holds. Must not fail.
    std::function<void()> drop = [] {};
    /// Undoes what a failed attempt has changed, before the next one. For a single
    /// process, a failure in it counts as a failure of the next attempt.
    std::function<void()> restore = [] {};
    /// With several ranks: called after each attempt with whether it failed on this one;
    /// returns whether it failed on any. All ranks then call `restore` together, and it
    /// must not fail on one of them alone.
    std::function<bool(bool failed)> agree{};
  };

  /// Runs `body` until no allocation fails in it. Between attempts CUDA's unused memory
  /// is returned to the driver. Throws RetriesExhausted after kMaxFailures failures in a
  /// row; `what` names the work in warnings.
  void run(const std::string& what, const std::function<void()>& body,
           const Recovery& recovery);
  void run(const std::string& what, const std::function<void()>& body) {
    run(what, body, Recovery{});
  }

 private:
  std::optional<std::string> attempt(const std::string& what,
                                     const std::function<void()>& body) const;

  c10::Device device_;
  Warn warn_;
  std::function<void()> release_;
};

}  // namespace reprise::detail
