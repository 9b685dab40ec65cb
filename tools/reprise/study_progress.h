#pragma once

#include <reprise/study/runner.h>

#include <optional>
#include <string>
#include <vector>

namespace reprise::command {

using Predictions = std::vector<std::optional<TrainingPrediction>>;

/// Runs, time and what will not fit, a line a run.
std::string estimate_table(const Study& study, const StudyOptions& options,
                           const Predictions& predictions);

/// Shows a study on standard error: a line a run, as it ends; on a terminal also
/// the one under way.
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
  bool open_ = false;  // a changing line stands there
};

}  // namespace reprise::command
