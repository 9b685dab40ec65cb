#include "session.h"

#include <reprise/train/trainer.h>

namespace reprise {

Training::Training(const TrainConfig& config)
    : session_(std::make_unique<train_detail::Session>(config)) {}

Training::~Training() = default;

TrainResult Training::run(const TrainRun& run) {
  return session_->run(run);
}

}  // namespace reprise
