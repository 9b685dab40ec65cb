#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace reprise::detail {

/// Runs `body`. What the error says where the memory of a tensor was refused in
/// it; other errors pass through, std::bad_alloc too: that one may come between
/// two writes of an update.
std::optional<std::string> out_of_memory_in(const std::function<void()>& body);

/// Memory ran out as often in a row as is tried.
class RetriesExhausted : public c10::Error {
  using Error::Error;
};

/// Repeats work in which an allocation failed.
class OomRetry {
 public:
  using Warn = std::function<void(const std::string&)>;

  /// Failures in a row after which it gives up.
  static constexpr int kMost = 8;

  /// `let_go`: called after each failure, to release what can be done without.
  OomRetry(
      c10::Device device, Warn warn, std::function<void()> let_go = [] {});

  /// Runs `body` until no allocation fails in it; before each attempt but the
  /// first `back`, which must undo what the one before has left. A failure in
  /// `back` counts as one of the attempt. Between attempts CUDA's unused memory
  /// is given back to the driver. Throws RetriesExhausted after the last failure.
  void run(
      const std::string& what, const std::function<void()>& body,
      const std::function<void()>& back = [] {});

 private:
  c10::Device device_;
  Warn warn_;
  std::function<void()> let_go_;
};

}  // namespace reprise::detail
