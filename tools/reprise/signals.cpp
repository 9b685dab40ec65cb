#include "signals.h"

#include <atomic>
#include <csignal>

namespace reprise::command {
namespace {

std::atomic<int> stop_signal = 0;

/// Removes itself, so that a second signal ends the process.
extern "C" void on_signal(int number) {
  stop_signal = number;
  std::signal(number, SIG_DFL);
}

}  // namespace

std::function<bool()> stop_on_signals() {
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
  // The terminal was closed. nohup asks for not being told.
  if (std::signal(SIGHUP, on_signal) == SIG_IGN) std::signal(SIGHUP, SIG_IGN);
  return [] { return stop_signal.load() != 0; };
}

int stopped_status() {
  constexpr int kShell = 128;
  const int number = stop_signal.load();
  return kShell + (number != 0 ? number : SIGINT);
}

}  // namespace reprise::command
