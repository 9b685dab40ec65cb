// A session's plan: what it runs to stay within its budget.
#include "train/budget/budget_planner.h"
#include "train/loop/session.h"

#include <reprise/base/bytes.h>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace reprise::detail {

void Session::plan(std::unique_ptr<BudgetPlanner> planner,
                   const PlanningOptions& planning) {
  if (!planner && !config_.plans_schedule()) return;
  TORCH_CHECK(config_.memory_limit > 0,
              "[Training] a planner needs a memory_limit above 0");
  std::optional<BudgetPlanner::Decision> decision;
  if (first_rank()) {
    planner_ = planner ? std::move(planner)
                       : make_budget_planner(cost_parts(), request(), planning);
    measuring([&] { decision.emplace(planner_->decide()); });
  }
  adopt(*shared(std::move(decision)));
}

Execution Session::make_execution() const {
  if (!group_) return Execution(model_.chain, schedule_);
  ExecutionOptions options;
  if (reducer_) options.cuts = reducer_->cuts();
  options.final_from = [this](int stage) {
    if (reducing_) reducer_->final_from(stage);
  };
  return Execution(model_.chain, schedule_, std::move(options));
}

int64_t Session::predicted_peak_bytes() const {
  return decision_->predicted_peak_bytes +
         (reducer_ ? reducer_->extra_bytes() : 0);
}

PlanRequest Session::request() const {
  PlanRequest request;
  request.global_batch = config_.share();
  request.memory = config_.memory_limit;
  if (reducer_) {
    request.memory -= reducer_->extra_bytes();
    TORCH_CHECK(request.memory > 0, "[--memory] expected more than the ",
                format_bytes(reducer_->extra_bytes()),
                " that reducing gradients takes, got ",
                format_bytes(config_.memory_limit), "; see --bucket");
  }
  request.precisions = {to_text(config_.precision)};
  request.micro_batch = config_.batch;  // 0: to be chosen
  request.explain = false;
  return request;
}

void Session::measuring(const std::function<void()>& body) {
  // Planning may run the model; the training must not show it.
  window_snapshot_.remember(state_, samples_here_);
  // The operator of the training, of this rank alone.
  std::optional<SharedNormScope> alone;
  if (norms_) alone.emplace(nullptr);
  const auto put_back = [this] {
    accumulator_.abandon();
    window_snapshot_.restore();
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
  const WeightCopiesMode copies =
      decision.weight_copies.empty()
          ? config_.weight_copies
          : from_text<WeightCopiesMode>(decision.weight_copies);
  const bool other_copies = copies != config_.weight_copies;
  const bool other = decision.micro_batch != config_.batch || other_copies;
  if (other_copies) {
    drop_copies();
    config_.weight_copies = copies;
  }
  config_.batch = decision.micro_batch;
  config_.accumulate = decision.accumulate;
  schedule_ = decision.schedule;
  execution_ = make_execution();
  graphs_.drop();
  if (host_) host_->trim();  // planning has tried more than is needed
  profile_.reset();          // it shows another schedule
  decision_.emplace(std::move(decision));
  if (config_.graph != GraphMode::kOn) fit_graphs();
  if (other) keep_config();
}

void Session::fit_graphs() {
  graphs_.set_limit(config_.memory_limit);
  if (!graphs_.active() || decision_->graph) return;
  graphs_.give_up_memory(fmt::format(
      "the plan, of {} within {}, leaves no room for it; --graph on "
      "plans for one",
      format_bytes(predicted_peak_bytes()),
      format_bytes(config_.memory_limit)));
}

void Session::keep_config() {
  if (run_.directory == nullptr || !planned()) return;
  try {
    run_.directory->set_config(config_);
  } catch (const c10::Error& error) {
    // As with a state that cannot be written.
    warn(std::string("not saved: ") + error.what_without_backtrace());
  }
}

bool Session::tighten(int64_t over_bytes) {
  if (!planned()) return false;
  drop_copies();  // the planner measures with its own
  std::optional<BudgetPlanner::Decision> own;
  if (planner_) own = planner_->tighten(*decision_, over_bytes);
  auto decision = shared(std::move(own));
  if (!decision) return false;
  ++replans_;
  adopt(std::move(*decision));
  return true;
}

void Session::keep_within_budget() {
  if (!planned()) return;
  const int64_t without = window_meter_.peak_bytes();
  int64_t peak = std::max(without, graphs_.peak_bytes());
  // Whether graphs fit is each rank's own affair; the plan is everybody's.
  if (group_) {
    const bool leave_graphs =
        config_.graph != GraphMode::kOn && graphs_.active();
    peak = group_->all_reduce_max({leave_graphs ? without : peak}).at(0);
    if (leave_graphs && graphs_.peak_bytes() > config_.memory_limit) {
      graphs_.give_up_memory("it does not fit into the budget");
    }
  }
  const int64_t over = peak - config_.memory_limit;
  if (over <= 0 || over_for_good_) return;
  if (!group_ && without <= config_.memory_limit &&
      config_.graph != GraphMode::kOn) {
    graphs_.give_up_memory(
        fmt::format("update {} took {} with it, the budget is {}", state_.step,
                    format_bytes(peak), format_bytes(config_.memory_limit)));
    return;
  }
  const int64_t batch = config_.batch;
  graphs_.clear();  // their memory is not the plan's
  const auto again = [&] {
    measuring([&] { over_for_good_ = !tighten(over); });
  };
  if (group_) {
    again();
  } else {
    oom_retry_.run("planning", again);
  }
  if (config_.batch != batch) open_loader();
  warn(fmt::format("update {} took {}, the budget is {}; {}", state_.step,
                   format_bytes(peak), format_bytes(config_.memory_limit),
                   over_for_good_ ? "nothing smaller is left"
                                  : "from now on " + decision_->text));
}

void Session::tighten_after_failure() {
  if (tighten(0)) warn("from now on " + decision_->text);
}

}  // namespace reprise::detail
