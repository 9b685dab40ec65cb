#include "train/loop/reporter.h"

namespace reprise::detail {

void Reporter::set_listener(TrainListener* listener) {
  listener_ = listener;
  started_ = true;
  for (const std::string& text : early_warnings_) warn(text);
  early_warnings_.clear();
}

bool Reporter::step_due(bool now) {
  constexpr auto kEvery = std::chrono::milliseconds(250);
  const auto time = std::chrono::steady_clock::now();
  if (!now && time - last_step_ < kEvery) return false;
  last_step_ = time;
  return true;
}

}  // namespace reprise::detail
