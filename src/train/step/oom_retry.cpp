#include "train/step/oom_retry.h"

#include "compat/cuda.h"

#include <reprise/memory/meter.h>

#include <fmt/format.h>

#include <utility>

namespace reprise::detail {

std::string first_line(const c10::Error& error) {
  return error.msg().substr(0, error.msg().find('\n'));
}

std::optional<std::string> out_of_memory_in(const std::function<void()>& body) {
  try {
    body();
  } catch (const RetriesExhausted&) {
    throw;  // its message is that of an allocation failure, but do not retry
  } catch (const c10::Error& error) {
    if (!is_out_of_memory(error)) throw;
    return first_line(error);
  }
  return std::nullopt;
}

void repeat_part(c10::Device device, const std::function<void()>& part,
                 const std::function<void()>& release) {
  constexpr int kMaxAttempts = 3;
  for (int attempt = 1; attempt < kMaxAttempts; ++attempt) {
    if (!out_of_memory_in(part)) return;
    release();
    if (device.is_cuda()) compat::empty_cuda_cache();
  }
  part();
}

OomRetry::OomRetry(c10::Device device, Warn warn, std::function<void()> release)
    : device_(device), warn_(std::move(warn)), release_(std::move(release)) {}

std::optional<std::string> OomRetry::attempt(
    const std::string& what, const std::function<void()>& body) const {
  try {
    const auto error = out_of_memory_in(body);
    if (!error) return std::nullopt;
    return fmt::format("{} ran out of memory: {}", what, *error);
  } catch (const FailedOnAnotherRank&) {
    return what + " ran out of memory on another rank";
  }
}

void OomRetry::run(const std::string& what, const std::function<void()>& body,
                   const Recovery& recovery) {
  for (int failures = 0;;) {
    auto failure = attempt(what, [&] {
      if (failures > 0 && !recovery.agree) recovery.restore();
      body();
    });
    if (failure) {
      // Outside of the handler, where the frames of the failed attempt are
      // gone.
      recovery.drop();
      release_();
      if (device_.is_cuda()) compat::empty_cuda_cache();
    }
    if (recovery.agree) {
      if (!recovery.agree(failure.has_value())) return;
      if (!failure) failure = what + " ran out of memory on another rank";
      recovery.restore();
    } else if (!failure) {
      return;
    }
    if (++failures == kMaxFailures) {
      throw RetriesExhausted(
          {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
          fmt::format("[train] {} times in a row {}", kMaxFailures, *failure));
    }
    warn_(*failure + "; starts again");
  }
}

}  // namespace reprise::detail
