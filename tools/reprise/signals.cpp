#include "signals.h"

#include <atomic>
#include <csignal>

namespace reprise::command {
namespace {

std::atomic<bool> stop_asked = false;

/// The handler is gone by the time of a second signal.
extern "C" void on_signal(int number) {
  stop_asked = true;
  std::signal(number, SIG_DFL);
}

}  // namespace

std::function<bool()> stop_on_signals() {
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
  return [] { return stop_asked.load(); };
}

}  // namespace reprise::command
