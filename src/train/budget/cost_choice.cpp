#include "train/budget/cost_choice.h"

#include "compat/cuda.h"
#include "compat/denormals.h"
#include "plan/evaluator.h"
#include "train/config/update_refusal.h"
#include "train/step/oom_retry.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

namespace reprise::detail {
namespace {

void set_copies(PlanResult& result, std::optional<WeightCopiesMode> copies) {
  result.plan.weight_copies = copies;
  for (Plan& plan : result.alternatives) plan.weight_copies = copies;
}

// The least share of the optimizer's state that a plan may move; see choose_share().
constexpr double kLeastHostShare = 0.25;
// Predicted times may be too long; a training takes at least this share of them.
constexpr double kLeastOfPrediction = 0.9;

/// Less is better.
std::tuple<bool, double> rank_of(const PlanResult& result) {
  return {!result.feasible, result.feasible
                                ? result.plan.step_ms
                                : static_cast<double>(result.smallest_bytes)};
}

/// Adds what settings would give that change results, and are therefore never chosen.
void add_inexact_reductions(const TrainingCosts& costs,
                            const FixedMemory& fixed, PlanResult& result) {
  const auto add = [&](std::string what, int64_t saved_bytes) {
    const int64_t peak_bytes = result.plan.peak_bytes - saved_bytes;
    if (saved_bytes <= 0 || peak_bytes <= 0) return;
    result.peak_reductions.push_back({std::move(what), peak_bytes, 0});
  };
  const TrainOptions& options = costs.options();
  const std::string& optimizer = options.optimizer.name;
  if (optimizer == "adam" || optimizer == "adamw") {
    // Two bytes per parameter instead of eight, except for embeddings.
    add(optimizer + "8bit, at most; changes results", fixed.optimizer * 3 / 4);
  }
  const bool sums = result.plan.accumulate > 1 &&
                    options.state != StatePlace::kHostAll &&
                    options.gradients == GradientSums::kFp32;
  if (sums) add("--gradients bf16; changes results", fixed.gradients / 2);
  if (options.parameters == ParameterType::kFp32 &&
      result.plan.precision == Precision::kBf16 &&
      options.state != StatePlace::kHostAll) {
    // With copies, six bytes per weight become two.
    add("--parameters bf16, at most; changes results", fixed.parameters / 2);
  }
}

/// Whether stages run again or, within a budget of `memory` bytes that is nearly used up, keep
/// less than they could.
bool recomputes(const Plan& plan, int64_t memory) {
  constexpr double kNearly = 0.9;
  if (plan.schedule.total_runs() > plan.schedule.stages()) return true;
  const auto& ops = plan.schedule.ops();
  const bool varies = std::any_of(ops.begin(), ops.end(),
                                  [](const Op& op) { return op.variant != 0; });
  return memory > 0 && varies &&
         static_cast<double>(plan.peak_bytes) >
             kNearly * static_cast<double>(memory);
}

}  // namespace

PlanResult plan_with(TrainingCosts& costs, const PlanRequest& request) {
  PlanResult result = make_plan(request, costs);
  const auto complete = [&](Plan& plan) {
    const CostProfile& profile = costs.profile(plan.precision);
    plan.state = costs.state();
    plan.host_share = costs.host_share();
    const auto sum = [](const std::vector<int64_t>& bytes) {
      return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
    };
    const int64_t gradients = sum(profile.moved_gradient_bytes);
    HostState& host = plan.host_state;
    host.parameters = sum(profile.moved_bytes);
    host.optimizer = profile.host_state_bytes - host.parameters - gradients;
    // A single micro-batch leaves no gradients.
    host.gradients = plan.accumulate > 1 ? gradients : 0;
  };
  complete(result.plan);
  for (Plan& plan : result.alternatives) complete(plan);
  if (request.explain) {
    add_inexact_reductions(costs, costs.profile(result.plan.precision).fixed,
                           result);
  }
  costs.release_optimizer();
  return result;
}

CostChoice::CostChoice(TrainSetup setup, TrainingCosts::Options options)
    : free_copies_(setup.options.weight_copies == WeightCopiesMode::kAuto &&
                   setup.device.is_cuda()),
      free_state_(setup.options.state == StatePlace::kAuto &&
                  !setup.own_optimizer && setup.state_memory != nullptr),
      setup_(std::move(setup)),
      options_(std::move(options)),
      usual_(std::in_place, setup_, options_) {}

PlanResult CostChoice::plan(const PlanRequest& request, const Plan* present) {
  const compat::FlushDenormals flush(setup_.device);
  PlanResult result = choose(request, present);
  if (setup_.settings) {
    result.plan.settings = setup_.settings;
    for (Plan& plan : result.alternatives) plan.settings = setup_.settings;
  }
  // Free workspaces that the training does not need.
  usual_->release_workspaces();
  for (auto& [way, costs] : others_) costs->release_workspaces();
  return result;
}

PlanResult CostChoice::choose(const PlanRequest& request, const Plan* present) {
  if (present != nullptr) begin_training();
  if (present != nullptr && free_state_ && state_on_host(present->state)) {
    // The state stays where it is.
    const auto copies = present->weight_copies;
    PlanResult result =
        plan_with(*costs_with({copies.value_or(setup_.options.weight_copies),
                               present->state, present->host_share},
                              /*create=*/true),
                  request);
    set_copies(result, copies);
    return result;
  }
  // A training does not move its state.
  const bool moves = free_state_ && request.memory > 0 && present == nullptr;
  std::optional<PlanResult> best;
  std::string failure;
  if (!moves || !is_hopeless(*usual_, request)) {
    const auto failed =
        out_of_memory_in([&] { best.emplace(plan_usual(request)); });
    // The device may have no room to measure an update with the state on it.
    TORCH_CHECK_WITH(OutOfMemoryError, !failed || moves, *failed);
    failure = failed.value_or("");
  }
  bool tight = true;
  if (best) {
    tight = !best->feasible || recomputes(best->plan, request.memory);
    choose_copies(request, tight, *best);
    tight = tight || best->plan.update == UpdateMode::kBackward;
  }
  if (moves) choose_state(request, tight, best);
  if (best) return std::move(*best);
  // Nothing fits: tell the smallest budget that works.
  const StatePlace least =
      may_move_parameters(request) ? StatePlace::kHostAll : StatePlace::kHost;
  // Without room in host memory there is no such plan.
  (void)out_of_memory_in([&] {
    best.emplace(plan_with(*costs_with({setup_.options.weight_copies, least},
                                       /*create=*/true),
                           request));
  });
  if (best && fits_in_host(*best)) return std::move(*best);
  TORCH_CHECK_WITH(OutOfMemoryError, failure.empty(), failure);
  return plan_usual(request);
}

bool CostChoice::may_move_parameters(const PlanRequest& request) const {
  if (!setup_.host_parameters) return false;
  TrainOptions options = setup_.options;
  return std::all_of(request.precisions.begin(), request.precisions.end(),
                     [&](Precision precision) {
                       options.precision = precision;
                       return parameters_refusal(options).empty();
                     });
}

bool CostChoice::fits_in_host(const PlanResult& result) const {
  return result.plan.host_state.total() <= setup_.state_memory->limit_bytes();
}

bool CostChoice::is_hopeless(TrainingCosts& costs,
                             const PlanRequest& request) const {
  // A lower bound that needs no measurement of micro-batches.
  bool hopeless = true;
  const auto failure = out_of_memory_in([&] {
    for (const Precision precision : request.precisions) {
      const FixedMemory& fixed = costs.profile(precision).fixed;
      hopeless =
          hopeless && fixed.parameters + fixed.optimizer > request.memory;
    }
  });
  if (failure && setup_.device.is_cuda()) compat::empty_cuda_cache();
  if (hopeless) costs.release_optimizer();
  return hopeless;
}

void CostChoice::begin_training() {
  options_.training = true;
  if (usual_) usual_->begin_training();
  for (auto& [way, costs] : others_) costs->begin_training();
}

PlanResult CostChoice::plan_usual(const PlanRequest& request) {
  try {
    return plan_with(*usual_, request);
  } catch (const c10::OutOfMemoryError& error) {
    const std::string& text = error.msg();
    if (!text.starts_with("[--state]")) throw;
    if (options_.progress) options_.progress(text + "; it stays on the device");
  }
  setup_.options.state = StatePlace::kDevice;
  usual_.emplace(setup_, options_);
  return plan_with(*usual_, request);
}

void CostChoice::choose_copies(const PlanRequest& request, bool tight,
                               PlanResult& best) {
  const Precision precision = best.plan.precision;
  // Parameters in host memory are converted at each use.
  const bool moved = setup_.options.state == StatePlace::kHostAll;
  if (!free_copies_ || precision == Precision::kFp32 || request.memory == 0 ||
      moved || setup_.options.parameters == ParameterType::kBf16) {
    return;
  }
  // A loop or an optimizer of the caller may read weights at any time.
  const bool splits = precision == Precision::kBf16 && !setup_.own_optimizer &&
                      setup_.options.gradients == GradientSums::kFp32;
  for (const auto mode : {WeightCopiesMode::kSplit, WeightCopiesMode::kEach}) {
    if (mode == WeightCopiesMode::kSplit && !splits) continue;
    // Conversions need hardly less memory than split weights, and more time.
    if (mode == WeightCopiesMode::kEach && splits && best.feasible) continue;
    TrainingCosts* costs =
        costs_with({mode, setup_.options.state}, /*create=*/tight);
    if (costs == nullptr) continue;
    PlanRequest with_rival = request;
    if (best.feasible) with_rival.rival_ms = best.plan.step_ms;
    PlanResult other = plan_with(*costs, with_rival);
    if (rank_of(best) <= rank_of(other)) continue;
    set_copies(other, mode);
    best = std::move(other);
  }
}

void CostChoice::choose_state(const PlanRequest& request, bool tight,
                              std::optional<PlanResult>& best) {
  const WeightCopiesMode given = setup_.options.weight_copies;
  const auto consider = [&](const Way& way) {
    TrainingCosts* costs = costs_with(way, /*create=*/tight);
    if (costs == nullptr || is_hopeless(*costs, request)) return;
    PlanRequest with_rival = request;
    if (best && best->feasible) with_rival.rival_ms = best->plan.step_ms;
    std::optional<PlanResult> other;
    const auto failure =
        out_of_memory_in([&] { other.emplace(plan_with(*costs, with_rival)); });
    // Without room in host memory there is no such plan.
    if (failure || !fits_in_host(*other)) return;
    if (best && rank_of(*best) <= rank_of(*other)) return;
    if (way.copies != given) set_copies(*other, way.copies);
    best = std::move(other);
  };
  if (best && best->feasible && best->plan.step_ms < least_host_ms(request)) {
    return;
  }
  const auto copies = best ? best->plan.weight_copies : std::nullopt;
  consider({copies.value_or(given), StatePlace::kHost});
  const bool recomputed =
      !best || !best->feasible || recomputes(best->plan, request.memory);
  if (!copies && recomputed && free_copies_ &&
      request.precisions == std::vector{Precision::kBf16} &&
      setup_.options.gradients == GradientSums::kFp32) {
    consider({WeightCopiesMode::kSplit, StatePlace::kHost});
  }
  choose_share(consider, best);
  // As long as the optimizer's state fits on the device, moving parameters is slower.
  const bool on_host =
      !best || !best->feasible || best->plan.state == StatePlace::kHost;
  if (on_host && may_move_parameters(request)) {
    consider({given, StatePlace::kHostAll});
  }
}

double CostChoice::least_host_ms(const PlanRequest& request) {
  if (link_.to_device == 0) link_ = usual_->link();
  if (link_.to_device == 0) return 0;
  double least = 0;
  for (const Precision precision : request.precisions) {
    const CostProfile& profile = usual_->profile(precision);
    const double copies_ms = static_cast<double>(profile.fixed.optimizer) *
                             kLeastHostShare /
                             std::max(link_.to_device, link_.to_host);
    const double ms =
        kLeastOfPrediction * least_step_ms(profile, request.global_batch) +
        copies_ms;
    least = least == 0 ? ms : std::min(least, ms);
  }
  return least;
}

void CostChoice::choose_share(const std::function<void(const Way&)>& consider,
                              const std::optional<PlanResult>& best) const {
  if (!best || !best->feasible) return;
  const WeightCopiesMode copies =
      best->plan.weight_copies.value_or(setup_.options.weight_copies);
  if (best->plan.state != StatePlace::kHost) {
    // All of it takes too long; a small part may not.
    return consider({copies, StatePlace::kHost, kLeastHostShare});
  }
  consider({copies, StatePlace::kHost, 0.5});
  const bool less = best->plan.host_share == 0.5;
  consider({copies, StatePlace::kHost, less ? kLeastHostShare : 0.75});
}

bool CostChoice::has_usual_steps(const Way& way) const {
  // The optimizer's state makes no difference, nor does it whether copies are inside the
  // weights.
  return way.state != StatePlace::kHostAll &&
         (way.copies == setup_.options.weight_copies ||
          way.copies == WeightCopiesMode::kSplit);
}

const TrainingCosts* CostChoice::most_measured() const {
  const TrainingCosts* most = &*usual_;
  for (const auto& [way, costs] : others_) {
    if (has_usual_steps(way) && costs->measurements() > most->measurements()) {
      most = costs.get();
    }
  }
  return most;
}

TrainingCosts* CostChoice::costs_with(const Way& way, bool create) {
  auto found = others_.find(way);
  if (found == others_.end()) {
    if (!create) return nullptr;
    TrainSetup setup = setup_;
    setup.options.weight_copies = way.copies;
    setup.options.state = way.state;
    setup.options.host_share = way.host_share;
    TrainingCosts::Options options = options_;
    if (has_usual_steps(way)) options.same_steps = most_measured();
    options.same_update = &*usual_;
    found = others_
                .emplace(way, std::make_unique<TrainingCosts>(std::move(setup),
                                                              options))
                .first;
  }
  return found->second.get();
}

}  // namespace reprise::detail
