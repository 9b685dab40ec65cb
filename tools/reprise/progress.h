#pragma once

#include <reprise/train/trainer.h>

#include <chrono>
#include <cstdio>
#include <string>

namespace reprise::command {

/// Shows the progress of a training on standard error or in another open file:
/// one line that is rewritten on a terminal, occasional lines in a log file.
/// Tested by tests/tools/train_command_test.sh.
class Progress : public TrainListener {
 public:
  explicit Progress(std::FILE* out = stderr);  // not owned
  ~Progress() override;

  void started(const Start& start) override;
  void stepped(const Step& step) override;
  void evaluated(const Evaluation& evaluation) override;
  void saved(const std::string& path) override;
  void warned(const std::string& text) override;
  bool needs_gradients() const override { return false; }
  bool reads_parameters() const override { return false; }

 private:
  void line(const std::string& text);
  std::FILE* out_;
  bool terminal_;
  bool open_ = false;  // the current line will be rewritten
  std::chrono::steady_clock::time_point last_{};
  int lines_ = 0;
};

}  // namespace reprise::command
