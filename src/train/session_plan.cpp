// A session's plan: what it runs to stay within its budget.
#include "budget_planner.h"
#include "session.h"

#include <reprise/memory/bytes.h>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace reprise::train_detail {

void Session::plan(std::unique_ptr<BudgetPlanner> planner,
                   const PlanningOptions& planning) {
  if (!planner && config_.recompute != "optimal") return;
  TORCH_CHECK(config_.memory_limit > 0,
              "[Training] a planner needs a memory_limit above 0");
  planner_ = planner ? std::move(planner)
                     : make_budget_planner(cost_parts(), request(), planning);
  measuring([this] { adopt(planner_->decide()); });
}

PlanRequest Session::request() const {
  PlanRequest request;
  request.global_batch = config_.global_batch;
  request.memory = config_.memory_limit;
  request.precisions = {config_.precision};
  request.micro_batch = config_.batch;  // 0: to be chosen
  request.explain = false;
  return request;
}

void Session::measuring(const std::function<void()>& body) {
  // Planning may run the model; the training must not show it.
  window_start_.remember(state_, samples_here_);
  const auto put_back = [this] {
    accumulator_.abandon();
    window_start_.restore();
  };
  try {
    body();
  } catch (...) {
    put_back();
    throw;
  }
  put_back();
}

void Session::adopt(BudgetPlanner::Decision decision) {
  const bool other_size = decision.micro_batch != config_.batch;
  config_.batch = decision.micro_batch;
  config_.accumulate = decision.accumulate;
  schedule_ = decision.schedule;
  execution_ = Execution(model_.chain, schedule_);
  graphs_.drop();
  if (host_) host_->trim();  // planning has tried more than is needed
  profile_.reset();          // it shows another schedule
  decision_.emplace(std::move(decision));
  if (config_.graph != "on") fit_graphs();
  if (other_size) keep_config();
}

void Session::fit_graphs() {
  // Rather without a graph than with a slower plan.
  graphs_.set_limit(config_.memory_limit);
  // A plan of one micro-batch counts on gradients that are not there in the
  // forward; with graphs they stand.
  const int64_t gradients = storage_bytes(parameter_list_);
  if (!graphs_.active() || config_.accumulate > 1 ||
      decision_->predicted_peak_bytes + gradients <= config_.memory_limit) {
    return;
  }
  graphs_.give_up_memory(fmt::format(
      "gradients that stay take {}, which the plan's {} of {} do not leave",
      format_bytes(gradients), format_bytes(decision_->predicted_peak_bytes),
      format_bytes(config_.memory_limit)));
}

void Session::keep_config() {
  if (run_.directory == nullptr || !planner_) return;
  try {
    run_.directory->set_config(config_);
  } catch (const c10::Error& error) {
    // As with a state that cannot be written.
    warn(std::string("not saved: ") + error.what_without_backtrace());
  }
}

bool Session::tighten(int64_t over_bytes) {
  if (!planner_) return false;
  drop_copies();  // the planner measures with its own
  auto decision = planner_->tighten(*decision_, over_bytes);
  if (!decision) return false;
  ++replans_;
  adopt(std::move(*decision));
  return true;
}

void Session::keep_within_budget() {
  if (!planner_) return;
  const int64_t without = window_meter_.peak_bytes();
  const int64_t peak = std::max(without, graphs_.peak_bytes());
  const int64_t over = peak - config_.memory_limit;
  if (over <= 0 || over_for_good_) return;
  if (without <= config_.memory_limit && config_.graph != "on") {
    graphs_.give_up_memory(
        fmt::format("update {} took {} with it, the budget is {}", state_.step,
                    format_bytes(peak), format_bytes(config_.memory_limit)));
    return;
  }
  const int64_t batch = config_.batch;
  graphs_.clear();  // their memory is not the plan's
  rescue_.run("planning",
              [&] { measuring([&] { over_for_good_ = !tighten(over); }); });
  if (config_.batch != batch) open_loader();
  warn(fmt::format("update {} took {}, the budget is {}; {}", state_.step,
                   format_bytes(peak), format_bytes(config_.memory_limit),
                   over_for_good_ ? "nothing smaller is left"
                                  : "from now on " + decision_->text));
}

void Session::tighten_after_failure() {
  if (tighten(0)) warn("from now on " + decision_->text);
}

}  // namespace reprise::train_detail
