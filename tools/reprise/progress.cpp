#include "progress.h"

#include "output.h"

#include <reprise/base/bytes.h>

#include <fmt/format.h>

#include <cstdio>
#include <unistd.h>

namespace reprise::command {
namespace {

using Clock = std::chrono::steady_clock;

std::string time_left(double seconds) {
  const auto s = static_cast<int64_t>(seconds);
  if (s >= 3600)
    return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
  return fmt::format("{}:{:02}", s / 60, s % 60);
}

std::string text_of(const TrainListener::Step& step) {
  std::string text = fmt::format(
      "step {}{}  loss {:.4f}  {:.1f} samples/s  memory {}, peak {}", step.step,
      step.total_steps > 0 ? fmt::format("/{}", step.total_steps) : "",
      step.loss, step.samples_per_s, format_bytes(step.live_bytes),
      format_bytes(step.peak_bytes));
  if (step.limit_bytes > 0) {
    text += " of " + format_bytes(step.limit_bytes);
  }
  return text + "  left " + time_left(step.left_s);
}

}  // namespace

Progress::Progress(std::FILE* out)
    : out_(out), terminal_(isatty(fileno(out)) != 0) {}

Progress::~Progress() {
  if (open_) print_text("\n", out_);
}

void Progress::started(const Start& start) {
  line(start.model);
  line(start.data);
  line(start.how);
  if (start.step > 0) {
    line(fmt::format("continues after update {} of {}", start.step,
                     start.total_steps));
  }
}

void Progress::stepped(const Step& step) {
  if (terminal_) {
    print_text("\r\033[K" + text_of(step), out_);
    open_ = true;
    return;
  }
  // In a log file, print more often at first, then every ten seconds.
  const double since =
      std::chrono::duration<double>(Clock::now() - last_).count();
  const bool last = step.step == step.total_steps;
  if (!last && lines_ > 0 && since < (lines_ < 4 ? 2 : 10)) return;
  last_ = Clock::now();
  ++lines_;
  line(text_of(step));
}

void Progress::evaluated(const Evaluation& evaluation) {
  std::string text = fmt::format("test after update {}: loss {:.4f}",
                                 evaluation.step, evaluation.loss);
  for (const auto& [name, value] : evaluation.metrics) {
    text += fmt::format(", {} {}", name, metric_text(name, value));
  }
  line(text);
}

void Progress::saved(const std::string& path) {
  line("saved " + path);
}

void Progress::warned(const std::string& text) {
  line("warning: " + text);
}

void Progress::line(const std::string& text) {
  print_text((open_ ? "\r\033[K" : "") + text + "\n", out_);
  open_ = false;
}

}  // namespace reprise::command
