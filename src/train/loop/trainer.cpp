#include "train/loop/session.h"

#include <reprise/train/trainer.h>

#include <utility>

namespace reprise {

Training::Training(const TrainConfig& config,
                   std::unique_ptr<BudgetPlanner> planner,
                   const PlanningOptions& planning,
                   std::shared_ptr<RankGroup> ranks)
    : session_(std::make_unique<detail::Session>(config, std::move(planner),
                                                 planning, std::move(ranks))) {}

Training::~Training() = default;

TrainResult Training::run(const TrainRun& run) {
  return session_->run(run);
}

}  // namespace reprise
