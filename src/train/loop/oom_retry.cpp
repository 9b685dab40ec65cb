#include "train/loop/oom_retry.h"

#include "compat/cuda.h"

#include <reprise/memory/out_of_memory.h>

#include <fmt/format.h>

#include <utility>

namespace reprise::detail {

std::optional<std::string> out_of_memory_in(const std::function<void()>& body) {
  try {
    body();
  } catch (const RetriesExhausted&) {
    throw;  // it has the text of a failure, but is the end of them
  } catch (const c10::Error& error) {
    if (!is_out_of_memory(error)) throw;
    return error.msg().substr(0, error.msg().find('\n'));
  }
  return std::nullopt;
}

OomRetry::OomRetry(c10::Device device, Warn warn, std::function<void()> let_go)
    : device_(device), warn_(std::move(warn)), let_go_(std::move(let_go)) {}

void OomRetry::run(const std::string& what, const std::function<void()>& body,
                   const std::function<void()>& back) {
  std::string text;
  for (int failures = 0; failures < kMost; ++failures) {
    const auto error = out_of_memory_in([&] {
      if (failures > 0) back();
      body();
    });
    if (!error) return;
    // Here, not in the handler: what the failed attempt held is free by now.
    let_go_();
    if (device_.is_cuda()) compat::empty_cuda_cache();
    text = fmt::format("{} ran out of memory: {}", what, *error);
    if (failures + 1 < kMost) warn_(text + "; starts again");
  }
  throw RetriesExhausted(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
      fmt::format("[train] {} times in a row {}", kMost, text));
}

}  // namespace reprise::detail
