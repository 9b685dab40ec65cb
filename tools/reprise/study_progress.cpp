#include "study_progress.h"

#include "output.h"

#include <reprise/base/bytes.h>

#include <fmt/format.h>

#include <cstdio>
#include <unistd.h>

namespace reprise::command {
namespace {

std::string duration(double seconds) {
  const auto s = static_cast<int64_t>(seconds + 0.5);
  if (s >= 3600) return fmt::format("{} h {:02} min", s / 3600, s / 60 % 60);
  if (s >= 60) return fmt::format("{} min {:02} s", s / 60, s % 60);
  return fmt::format("{} s", s);
}

struct Estimate {
  double seconds = 0;
  int over = 0;     // runs predicted not to fit on the device
  int unknown = 0;  // runs without a prediction
};

bool over_memory(const std::optional<TrainingPrediction>& one,
                 const StudyOptions& options) {
  return one && options.device_memory > 0 &&
         one->peak_bytes > options.device_memory;
}

Estimate estimate(const Study& study, const StudyOptions& options,
                  const std::vector<size_t>& runs,
                  const Predictions& predictions) {
  Estimate sum;
  for (const size_t i : runs) {
    const auto one = i < predictions.size() ? predictions[i] : std::nullopt;
    sum.seconds += expected_seconds(study.runs[i], one);
    if (!one) ++sum.unknown;
    if (over_memory(one, options)) ++sum.over;
  }
  return sum;
}

std::string words_of(const Estimate& e) {
  std::string text = fmt::format("about {}", duration(e.seconds));
  if (e.over > 0) text += fmt::format(", {} will not fit", e.over);
  if (e.unknown > 0) text += fmt::format(", {} not predicted", e.unknown);
  return text;
}

}  // namespace

std::string estimate_table(const Study& study, const StudyOptions& options,
                           const Predictions& predictions) {
  std::string text = fmt::format("{}: {} runs on {}\n", study.name,
                                 study.runs.size(), options.device_name);
  std::vector<size_t> all;
  for (size_t i = 0; i < study.runs.size(); ++i) {
    all.push_back(i);
    const auto one = i < predictions.size() ? predictions[i] : std::nullopt;
    text += fmt::format("{:>4}  {:>10}  {:>10}  {}{}\n", i + 1,
                        one ? format_bytes(one->peak_bytes) : "-",
                        one ? fmt::format("{:.1f} ms", one->step_ms) : "-",
                        study.runs[i].description(study.constant),
                        over_memory(one, options) ? "  (will not fit)" : "");
  }
  return text + words_of(estimate(study, options, all, predictions)) + "\n";
}

StudyProgress::StudyProgress() : terminal_(isatty(STDERR_FILENO) != 0) {}

void StudyProgress::begin(const Study& study, const StudyOptions& options,
                          size_t todo) {
  line(fmt::format("{}: {}", study.name, study.title));
  line(fmt::format("{} runs on {} ({}), results in {}", todo,
                   options.device_name, options.device, options.directory));
  if (todo < study.runs.size()) {
    line(fmt::format("{} of the study's {} are done or another part's",
                     study.runs.size() - todo, study.runs.size()));
  }
}

void StudyProgress::estimated(const Study& study, const StudyOptions& options,
                              const std::vector<size_t>& todo,
                              const Predictions& predictions) {
  if (predictions.empty()) return;
  line(words_of(estimate(study, options, todo, predictions)));
}

void StudyProgress::end() {
  if (open_) print_text("\r\033[K");
  open_ = false;
}

void StudyProgress::run_started(const Run& run) {
  if (!terminal_) return;
  print_text(fmt::format("\r\033[K{}/{}  {}  left {}", run.number, run.total,
                         run.description, duration(run.remaining_s)));
  open_ = true;
}

void StudyProgress::run_ended(const RunResult& e) {
  std::string text =
      fmt::format("{:>{}}/{}  ", e.run.number,
                  std::to_string(e.run.total).size(), e.run.total);
  if (e.status == RunStatus::kDone) {
    text += fmt::format("peak {:>9}  kept {:>9}  {:>9.1f} samples/s",
                        format_bytes(e.peak_bytes), format_bytes(e.kept_bytes),
                        e.samples_per_s);
  } else {
    text += fmt::format("{}: {}", to_text(e.status), e.reason);
  }
  line(fmt::format("{}  {}  left {}", text, e.run.description,
                   duration(e.run.remaining_s)));
  for (const auto& warning : e.warnings) {
    line(fmt::format("      time is doubtful: {}", warning));
  }
}

void StudyProgress::line(const std::string& text) {
  end();
  print_text(text + "\n");
}

}  // namespace reprise::command
