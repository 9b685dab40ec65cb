#include "train/budget/budget_keeper.h"

#include "compat/cuda.h"
#include "data/batch_check.h"
#include "distributed/measure_network.h"
#include "train/budget/budget_planner.h"
#include "train/budget/device_settings.h"
#include "train/budget/schedule_timer.h"
#include "train/config/update_refusal.h"

#include <reprise/base/bytes.h>
#include <reprise/recompute/strategy.h>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace reprise::detail {

BudgetKeeper::BudgetKeeper(Parts parts)
    : parts_(std::move(parts)),
      window_meter_(parts_.setup.device),
      limit_(parts_.setup.options.memory_limit) {
  if (parts_.setup.options.graph != GraphMode::kOn) {
    parts_.runner.graphs().set_limit(limit_);
  }
}

void BudgetKeeper::plan(std::unique_ptr<BudgetPlanner> planner,
                        const PlanningOptions& options) {
  planning_ = options;
  const bool unasked = !planner && !parts_.setup.options.plans_schedule();
  if (unasked) {
    if (!parts_.setup.options.plans_if_long() || !worth_planning()) return;
    limit_ = free_bytes();
  }
  TORCH_CHECK(limit_ > 0, "[Trainer] a planner needs a memory_limit above 0");
  std::optional<Plan> first;
  if (const auto group = parts_.exchange.sharing()) {
    const auto measured_in = [&](RankGroup& ranks, Collective collective) {
      const int64_t bytes =
          std::min(parts_.setup.options.bucket_bytes,
                   std::max<int64_t>(parts_.exchange.traffic().gradient_bytes,
                                     int64_t{64} << 10));
      return measure_network(ranks, parts_.setup.device, collective, bytes);
    };
    const auto measured = [&](Collective collective) {
      return measured_in(*group, collective);
    };
    const bool divided = parts_.exchange.sharded();
    reducing_ =
        measured(divided ? Collective::kAllToAll : Collective::kAllReduce);
    if (divided) gathering_ = measured(Collective::kAllGather);
    if (const auto replicas = parts_.exchange.replicas()) {
      between_ = measured_in(*replicas, Collective::kAllReduce);
    }
    if (parts_.setup.sharded) parts_.setup.sharded->set_network(gathering_);
  }
  if (parts_.ranks.first()) {
    planner_ = planner ? std::move(planner)
                       : make_budget_planner(parts_.setup, request(), options);
    measuring([&] {
      try {
        first.emplace(planner_->decide());
      } catch (const c10::OutOfMemoryError&) {
        if (!unasked) throw;
        // The micro-batch does not fit even with recomputation; choose a smaller one.
        PlanRequest wanted = request();
        wanted.micro_batch = 0;
        planner_ = make_budget_planner(parts_.setup, wanted, options);
        first.emplace(planner_->decide());
      }
    });
  }
  adopt(*broadcast(std::move(first)));
}

void BudgetKeeper::require_complete_gradients() {
  complete_gradients_ = true;
  if (!planned() || current_->update != UpdateMode::kBackward) return;
  parts_.setup.options.update = UpdateMode::kAfter;
  planner_ = make_budget_planner(parts_.setup, request(), planning_);
  std::optional<Plan> other;
  parts_.runner.drop_weight_copies();  // the planner creates its own
  measuring([&] { other.emplace(planner_->decide()); });
  adopt(std::move(*other));
}

int64_t BudgetKeeper::predicted_peak_bytes() const {
  return current_->peak_bytes;
}

double BudgetKeeper::predicted_step_ms() const {
  // A backward takes about two thirds of a micro-batch.
  constexpr double kBackward = 2.0 / 3;
  WindowTraffic traffic = parts_.exchange.traffic();
  traffic.backward_ms = kBackward * current_->micro_ms;
  const TrainOptions& options = parts_.setup.options;
  const int sharing = parts_.exchange.sharing_ranks();
  if (parts_.setup.sharded) {
    // Meanwhile, parameters come over the same link.
    const double gathers =
        gathering_.gather_ms(parts_.setup.sharded->wire_bytes(), sharing);
    traffic.backward_ms = std::max(0.0, traffic.backward_ms - gathers);
  }
  double ms = current_->step_ms + exposed_ms(traffic, reducing_, options.shard,
                                             sharing, gathering_);
  if (const auto replicas = parts_.exchange.replicas()) {
    // Groups add up their shares, the last ones after the backward.
    traffic.gradient_bytes /= sharing;
    traffic.bucket_bytes /= sharing;
    traffic.parameter_bytes = 0;
    ms += exposed_ms(traffic, between_, Sharding::kNone, replicas->size());
  }
  return ms;
}

bool BudgetKeeper::worth_planning() {
  // Below this a plan cannot pay off, and is not worth measuring for either.
  constexpr int64_t kFewMicroBatches = 200;
  // Planning takes up to a minute.
  constexpr double kLongMs = 20 * 60 * 1000;
  const TrainOptions& options = parts_.setup.options;
  const int64_t count = micro_batches_of(parts_.setup);
  if (count < kFewMicroBatches) return false;
  const auto measured_here = [&] {
    bool worth = false;
    measuring([&] {
      const Schedule none =
          make_schedule("none", parts_.setup.model.chain.size());
      ScheduleTimer::Trial trial{.precision = options.precision,
                                 .micro_batch = options.batch,
                                 .schedule = none,
                                 .accumulate = options.accumulate > 1};
      double ms = 0;
      const bool failed =
          out_of_memory_in([&] {
            ms = ScheduleTimer(parts_.setup)
                     .time(
                         trial,
                         largest_batch(*parts_.setup.data.train, options.batch),
                         {.warm_up = true, .rows = 1})
                     .ms;
          }).has_value();
      worth = failed || ms * static_cast<double>(count) >= kLongMs;
    });
    compat::empty_cuda_cache();
    return worth;
  };
  const std::string answer =
      parts_.ranks.first() && measured_here() ? "plan" : "";
  return !parts_.ranks.broadcast_text(answer).empty();
}

int64_t BudgetKeeper::free_bytes() {
  // The rest is for the fragmentation of the allocator.
  constexpr double kUsable = 0.95;
  const int device = parts_.setup.device.index();
  compat::empty_cuda_cache();
  const int64_t free = compat::cuda_device_memory(device).free +
                       compat::cuda_memory(device).reserved;
  const auto usable = static_cast<int64_t>(kUsable * static_cast<double>(free));
  return -parts_.ranks.all_reduce_max({-usable}).at(0);
}

PlanRequest BudgetKeeper::request() const {
  const TrainOptions& options = parts_.setup.options;
  PlanRequest request;
  request.global_batch = options.share();
  request.memory = limit_;
  request.precisions = {options.precision};
  request.micro_batch = options.batch;  // 0: to be chosen
  if (options.update == UpdateMode::kBackward && !updates_in_last(options)) {
    request.micro_batch = request.global_batch;
  }
  request.explain = false;
  return request;
}

void BudgetKeeper::measuring(const std::function<void()>& body) {
  parts_.setup.snapshot->remember_tensors();
  const auto alone = parts_.exchange.alone();
  const auto restore = [this] {
    parts_.gradients.abandon();
    parts_.setup.snapshot->restore();
  };
  try {
    body();
  } catch (...) {
    restore();
    throw;
  }
  restore();
}

std::optional<Plan> BudgetKeeper::broadcast(std::optional<Plan> own) const {
  if (!parts_.ranks.group()) return own;
  const std::string text =
      parts_.ranks.broadcast_text(own ? to_json(*own) : "");
  if (text.empty()) return std::nullopt;
  return plan_from_json(text, parts_.setup.model.chain.size());
}

void BudgetKeeper::adopt(Plan plan) {
  TrainOptions& options = parts_.setup.options;
  const WeightCopiesMode copies =
      plan.weight_copies.value_or(options.weight_copies);
  const bool other_copies = copies != options.weight_copies;
  const bool sizes = plan.micro_batch != options.batch || other_copies;
  if (other_copies) {
    parts_.runner.drop_weight_copies();
    options.weight_copies = copies;
  }
  options.batch = plan.micro_batch;
  options.accumulate = plan.accumulate;
  options.host_share = plan.host_share;
  const bool placed = parts_.runner.set_state(plan.state, plan.accumulate > 1);
  if (!placed && state_on_host(plan.state) &&
      options.state == StatePlace::kAuto) {
    return adopt_without_host();
  }
  check_room_on_device(plan.state);
  parts_.runner.set_update(plan.update);
  parts_.runner.set_schedule(plan.schedule);
  // Trials may have allocated more host memory than the plan needs.
  if (parts_.setup.host) parts_.setup.host->trim();
  current_.emplace(std::move(plan));
  if (options.graph != GraphMode::kOn) fit_graphs();
  parts_.adopted(sizes);
}

void BudgetKeeper::check_room_on_device(StatePlace place) const {
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      place == StatePlace::kHostAll || !parts_.runner.moves_parameters(),
      "[--state] ", to_text(place),
      ": the device has no room for the parameters; use --state host-all or a "
      "larger --host-memory");
}

void BudgetKeeper::adopt_without_host() {
  parts_.setup.options.state = StatePlace::kDevice;
  parts_.runner.set_state(StatePlace::kDevice, /*accumulate=*/false);
  check_room_on_device(StatePlace::kDevice);
  std::optional<Plan> other;
  if (parts_.ranks.first()) {
    planner_ = make_budget_planner(parts_.setup, request(), planning_);
    parts_.runner.drop_weight_copies();  // the planner creates its own
    measuring([&] { other.emplace(planner_->decide()); });
  }
  adopt(*broadcast(std::move(other)));
}

void BudgetKeeper::fit_graphs() {
  StepGraphs& graphs = parts_.runner.graphs();
  graphs.set_limit(limit_);
  if (!graphs.active() || current_->graph) return;
  graphs.give_up_memory(fmt::format(
      "the plan, of {} within {}, leaves no room for it; --graph on "
      "plans for one",
      format_bytes(predicted_peak_bytes()), format_bytes(limit_)));
}

bool BudgetKeeper::tighten(int64_t over_bytes) {
  if (!planned()) return false;
  parts_.runner.drop_weight_copies();  // the planner creates its own
  std::optional<Plan> own;
  if (planner_) own = planner_->tighten(*current_, over_bytes);
  if (own && complete_gradients_ && own->update == UpdateMode::kBackward) {
    own.reset();
  }
  auto smaller = broadcast(std::move(own));
  if (!smaller) return false;
  ++replans_;
  adopt(std::move(*smaller));
  return true;
}

void BudgetKeeper::begin_window() {
  if (planned()) window_meter_.restart();
}

bool BudgetKeeper::end_window(int64_t step, bool ran_out) {
  if (!planned()) return false;
  if (ran_out) {
    parts_.retry.run(
        "planning", [this] { measuring([this] { tighten_after_failure(); }); });
    return true;
  }
  const TrainOptions& options = parts_.setup.options;
  StepGraphs& graphs = parts_.runner.graphs();
  const bool many = parts_.ranks.group() != nullptr;
  const bool optional_graphs = options.graph != GraphMode::kOn;
  const int64_t without = window_meter_.peak_bytes();
  int64_t peak = std::max(without, graphs.peak_bytes());
  if (many) {
    // Each rank decides on its CUDA graphs, but all ranks have the same plan.
    const bool leave_graphs = optional_graphs && graphs.active();
    peak = parts_.ranks.all_reduce_max({leave_graphs ? without : peak}).at(0);
    if (leave_graphs && graphs.peak_bytes() > limit_) {
      graphs.give_up_memory("it does not fit into the budget");
    }
  }
  const int64_t over = peak - limit_;
  if (over <= 0 || exhausted_) return false;
  if (!many && without <= limit_ && optional_graphs) {
    graphs.give_up_memory(
        fmt::format("update {} took {} with it, the budget is {}", step,
                    format_bytes(peak), format_bytes(limit_)));
    return false;
  }
  const int64_t batch = options.batch;
  graphs.clear();  // the plan does not include their memory
  const auto replan = [&] { measuring([&] { exhausted_ = !tighten(over); }); };
  if (many) {
    replan();
  } else {
    parts_.retry.run("planning", replan);
  }
  parts_.warn(fmt::format("update {} took {}, the budget is {}; {}", step,
                          format_bytes(peak), format_bytes(limit_),
                          exhausted_ ? "nothing smaller is left"
                                     : "from now on " + describe(*current_)));
  return options.batch != batch;
}

void BudgetKeeper::tighten_after_failure() {
  if (tighten(0)) parts_.warn("from now on " + describe(*current_));
}

}  // namespace reprise::detail
