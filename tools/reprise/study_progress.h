#pragma once

#include <reprise/study/runner.h>

#include <optional>
#include <string>
#include <vector>

/// Progress and estimates of `reprise study`. Tested by
/// tests/tools/study_command_test.sh.
namespace reprise::command {

using Predictions = std::vector<std::optional<TrainingPrediction>>;

/// Returns a table with one line per run, with its predicted peak memory and
/// time per update, and a line with the estimate for the whole study.
std::string estimate_table(const Study& study, const StudyOptions& options,
                           const Predictions& predictions);

/// Shows the progress of a study on standard error: one line per completed run,
/// and on a terminal the current run.
class StudyProgress final : public StudyListener {
 public:
  StudyProgress();

  void begin(const Study& study, const StudyOptions& options, size_t todo);
  void estimated(const Study& study, const StudyOptions& options,
                 const std::vector<size_t>& todo,
                 const Predictions& predictions);
  void end();

  void run_started(const Run& run) override;
  void run_ended(const RunResult& ended) override;

 private:
  void line(const std::string& text);
  bool terminal_;
  bool open_ = false;  // the current line will be rewritten
};

}  // namespace reprise::command
