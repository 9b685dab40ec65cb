#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>

namespace reprise::detail {

/// The first line of an error's message.
std::string first_line(const c10::Error& error);

/// Runs `body`. If an allocation fails in it, returns the error message. Other
/// errors propagate, including std::bad_alloc, which may occur between two
/// writes of an update.
std::optional<std::string> out_of_memory_in(const std::function<void()>& body);

/// Runs `part` up to three times while allocations fail in it. Between attempts calls `release`
/// and returns unused memory of the CUDA allocator to the driver. For parts of an update, whose
/// window cannot be repeated.
void repeat_part(c10::Device device, const std::function<void()>& part,
                 const std::function<void()>& release);

/// Thrown after kMaxFailures allocation failures in a row.
class RetriesExhausted : public c10::Error {
  using Error::Error;
};

/// Thrown in an attempt that cannot be completed because another rank failed.
class FailedOnAnotherRank : public std::exception {};

/// Repeats work in which an allocation failed: windows, evaluations, saves and
/// the parts of an update. With several ranks, all of them repeat a window
/// together. Its rules are also tested by tests/train/step/retry_rules_test.cpp.
class OomRetry {
 public:
  using Warn = std::function<void(const std::string&)>;

  static constexpr int kMaxFailures = 8;

  /// `release` is called after each failure to free caches and similar memory.
  OomRetry(
      c10::Device device, Warn warn, std::function<void()> release = [] {});

  struct Recovery {
    /// Frees the memory of a failed attempt. Must not fail.
    std::function<void()> drop = [] {};
    /// Called before the next attempt to undo the changes of a failed one. With
    /// a single process, an allocation failure in it counts as a failure of the
    /// next attempt.
    std::function<void()> restore = [] {};
    /// Called after each attempt if there are several ranks. `failed` says
    /// whether the attempt failed on this rank; returns whether it failed on
    /// any rank. If so, all ranks call `restore` together, which must not fail
    /// on only some of them.
    std::function<bool(bool failed)> agree{};
  };

  /// Runs `body` until no allocation fails in it. Unused memory of the CUDA
  /// allocator is returned to the driver between attempts. Throws
  /// RetriesExhausted after kMaxFailures failures in a row; `what` names the
  /// work in warnings.
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
