#include "worker.h"

#include "base/memory_limit.h"

#include <reprise/base/error.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <cxxabi.h>
#include <fstream>
#include <malloc.h>
#include <new>
#include <sys/time.h>
#include <typeinfo>
#include <unistd.h>

namespace reprise::fuzz {
namespace {

constexpr Limits kLimits;

// Of operator new, while an input runs.
std::atomic<bool> counting{false};
std::atomic<int64_t> live_bytes{0};
Progress* shared = nullptr;
std::string reported;  // by report_refusal()

[[noreturn]] void end_with(const char* problem, const std::string& detail) {
  counting = false;
  const size_t room = sizeof(shared->problem) - 1;
  const std::string text = std::string(problem) + ": " + detail;
  std::memcpy(shared->problem, text.data(), std::min(room, text.size()));
  _exit(kHasProblem);
}

void count_allocation(void* pointer, size_t bytes) {
  if (!counting) return;
  live_bytes += static_cast<int64_t>(malloc_usable_size(pointer));
  if (static_cast<int64_t>(bytes) > kLimits.single_bytes) {
    end_with("allocation", fmt::format("{} bytes at once", bytes));
  }
  if (live_bytes > kLimits.live_bytes) {
    end_with("allocation", fmt::format("{} bytes", live_bytes.load()));
  }
}

void set_alarm(double seconds) {
  itimerval timer{};
  timer.it_value.tv_sec = static_cast<time_t>(seconds);
  setitimer(ITIMER_REAL, &timer, nullptr);
}

bool says_out_of_memory(const std::string& message) {
  return message.find("allocate") != std::string::npos ||
         message.find("out of memory") != std::string::npos;
}

/// Ends the process if a message is not as it should be.
void check_message(const Target& target, const std::string& message) {
  if (says_out_of_memory(message)) end_with("allocation", message);
  if (message.empty()) end_with("message", "none");
  if (message.size() > kLimits.message_bytes) {
    end_with("message", fmt::format("of {} bytes: {}", message.size(),
                                    message.substr(0, 300)));
  }
  if (message.find("INTERNAL ASSERT") != std::string::npos) {
    end_with("assert", message);
  }
  if (!target.file.empty() && message.find(target.named) == std::string::npos) {
    end_with("message without the name of the file", message);
  }
}

}  // namespace

void report_refusal(const std::string& message) {
  reported = message;
}

std::string run_input(const Target& target, const std::string& folder,
                      const std::string& input, Progress& progress) {
  shared = &progress;
  const std::string path =
      target.file.empty() ? "" : folder + "/" + target.file;
  if (!path.empty()) std::ofstream(path, std::ios::binary) << input;
  reported.clear();
  std::string message;
  live_bytes = 0;
  counting = true;
  set_alarm(kLimits.input_s);
  try {
    target.run(path, input);
    message = reported;
  } catch (const Error& error) {
    message = error.what();
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  } catch (const std::bad_alloc&) {
    end_with("allocation", "std::bad_alloc");
  } catch (const std::exception& error) {
    int status = 0;
    const char* type =
        abi::__cxa_demangle(typeid(error).name(), nullptr, nullptr, &status);
    end_with("foreign exception",
             fmt::format("{}: {}", type != nullptr ? type : "?", error.what()));
  }
  set_alarm(0);
  counting = false;
  if (!message.empty()) check_message(target, message);
  return message;
}

void run_inputs(const Target& target, const Mutator& mutator,
                const std::string& folder, uint64_t end, double seconds,
                Progress& progress) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  // Allocations that are not made with operator new fail.
  limit_memory(limited_memory_bytes() + 2 * kLimits.live_bytes);
  for (; progress.number < end; ++progress.number) {
    const std::string input = mutator.input(progress.number);
    const bool refused = !run_input(target, folder, input, progress).empty();
    ++(refused ? progress.refused : progress.accepted);
    const std::chrono::duration<double> passed = Clock::now() - start;
    if (seconds > 0 && passed.count() > seconds) {
      ++progress.number;
      return;
    }
  }
}

}  // namespace reprise::fuzz

// Replacements that count. The default ones for arrays call these.

void* operator new(size_t bytes) {
  void* const pointer = std::malloc(bytes == 0 ? 1 : bytes);
  if (pointer == nullptr) throw std::bad_alloc();
  reprise::fuzz::count_allocation(pointer, bytes);
  return pointer;
}

void operator delete(void* pointer) noexcept {
  if (reprise::fuzz::counting && pointer != nullptr) {
    reprise::fuzz::live_bytes -=
        static_cast<int64_t>(malloc_usable_size(pointer));
  }
  std::free(pointer);
}

void operator delete(void* pointer, size_t) noexcept {
  operator delete(pointer);
}
