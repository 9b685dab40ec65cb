#pragma once

#include "examples.h"

#include <reprise/plan/planner.h>
#include <reprise/recompute/simulate.h>
#include <reprise/recompute/strategy.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

/// Costs of an imaginary device, and the memory and time of training on it.
namespace reprise::testing {

inline constexpr int kStages = 6;

/// Costs of an imaginary device. Bytes are proportional to the size, and times
/// have a constant part, as launches have. Records which sizes were measured.
class FakeCostSource final : public CostSource {
 public:
  explicit FakeCostSource(int64_t room = 1 << 20) : room_(room) {
    for (const Precision precision : {Precision::kFp32, Precision::kBf16}) {
      CostProfile& profile = profiles_[precision];
      profile.precision = precision;
      for (int i = 0; i < kStages; ++i) {
        profile.stages.push_back("s" + std::to_string(i));
        profile.gradient_bytes.push_back(2 * kMiB);
        profile.held_twice_bytes.push_back(i == kStages - 1 ? kMiB : 0);
      }
      profile.fixed.parameters = 12 * kMiB;
      profile.fixed.gradients = 12 * kMiB;
      profile.fixed.optimizer = 24 * kMiB;
      profile.update_ms = 3;
      profile.update_bytes = 2 * kMiB;
    }
  }

  const CostProfile& profile(Precision precision) override {
    return profiles_.at(precision);
  }

  bool measure(Precision precision, int64_t b) override {
    TORCH_CHECK(b >= smallest, "as BatchNorm with one value");
    if (b > room_) return false;
    asked.insert(b);
    SizeCosts size = costs(precision, b);
    if (change) change(precision, size);
    // Factors are measured with a CUDA graph if there is one.
    size.separate_graphs_factor = size.single_graph_factor =
        1 / faster_with_graph;
    profiles_.at(precision).add(std::move(size));
    return true;
  }

  std::optional<double> try_plan(const Plan& plan) override {
    CostProfile& profile = profiles_.at(plan.precision);
    const int64_t b = plan.micro_batch;
    const std::string text = plan.schedule.to_text();
    const auto known = profile.tried_ms(b, text, plan.graph);
    if (known) return known;
    const auto ms = time_of(plan);
    if (!ms) return std::nullopt;
    ++tries;
    profile.add(TriedSchedule{b, text, *ms, plan.graph, /*comparison=*/0,
                              UpdateMode::kAfter, extra_of(plan)});
    return ms;
  }

  bool compare(const std::vector<Plan>& plans) override {
    if (!compares) return false;
    ++comparisons;
    for (const Plan& plan : plans) {
      profiles_.at(plan.precision)
          .add(TriedSchedule{plan.micro_batch, plan.schedule.to_text(),
                             *time_of(plan), plan.graph, comparisons,
                             UpdateMode::kAfter, extra_of(plan)});
    }
    return true;
  }

  /// `part_ms`: time of an update in the backward.
  void set_update(UpdateMode update, double part_ms) {
    for (auto& [precision, profile] : profiles_) {
      profile.update = update;
      profile.backward_update_ms = part_ms;
      profile.final_gradient_bytes.assign(kStages, 2 * kMiB);
      profile.stage_update_bytes.assign(kStages, 0);
    }
  }
  void set_graph(GraphMode graph) {
    for (auto& [precision, profile] : profiles_) profile.graph = graph;
  }

  /// Returns the time of a micro-batch as the sum of its stages' times.
  static double sum_ms(int64_t b, const Schedule& schedule) {
    return simulate(schedule, costs(Precision::kFp32, b).chain_costs).time_ms +
           0.1;
  }

  static SizeCosts costs(Precision precision, int64_t b) {
    const int64_t unit = (precision == Precision::kBf16 ? kMiB / 2 : kMiB);
    SizeCosts size;
    size.micro_batch = b;
    std::vector<StageCosts> stages;
    for (int i = 0; i < kStages; ++i) {
      StageCosts stage = StageCosts::simple(b * unit, b * unit * (1 + i % 3),
                                            0.4 + 0.1 * double(b * (1 + i % 2)),
                                            0.8 + 0.2 * double(b));
      stages.push_back(stage);
    }
    size.chain_costs = ChainCosts::simple(b * 1000, std::move(stages));
    size.data_bytes = b * 1000;
    size.other_ms = 0.1;
    return size;
  }

  std::set<int64_t> asked;
  int64_t smallest = 1;
  /// Modifies the costs of a size.
  std::function<void(Precision precision, SizeCosts&)> change;
  /// Returns the time of a micro-batch that is tried. If empty, plans cannot be
  /// tried.
  std::function<std::optional<double>(int64_t, const Schedule&)> truth;
  /// Returns the bytes of a plan that are measured and not predicted; 0 if empty.
  std::function<int64_t(const Schedule&)> extra;
  double faster_with_graph = 1;
  double load = 1;        ///< load of the machine: factor of all measured times
  bool compares = false;  ///< whether it times plans alternately
  int tries = 0;
  int comparisons = 0;

 private:
  std::optional<double> time_of(const Plan& plan) const {
    auto ms = truth ? truth(plan.micro_batch, plan.schedule) : std::nullopt;
    if (!ms) return std::nullopt;
    if (plan.graph) *ms /= faster_with_graph;
    return *ms * load;
  }

  int64_t extra_of(const Plan& plan) const {
    return extra ? extra(plan.schedule) : 0;
  }

  std::map<Precision, CostProfile> profiles_;
  int64_t room_;
};

inline PlanRequest request_for(int64_t global_batch, int64_t memory) {
  PlanRequest request;
  request.global_batch = global_batch;
  request.memory = memory;
  request.margin = 0;
  return request;
}

/// Returns the memory and time of a window, computed independently of the
/// planner.
struct Window {
  int64_t peak = 0;
  double ms = 0;
};

inline Window window_of(int64_t global, int64_t b, const Schedule& schedule,
                        bool graph = false) {
  const int64_t k = (global + b - 1) / b;
  const int64_t rest = global - (k - 1) * b;
  ChainCosts chain_costs =
      FakeCostSource::costs(Precision::kFp32, b).chain_costs;
  int64_t fixed = 12 * kMiB + 24 * kMiB + b * 1000;
  if (graph)
    fixed += b * 1000 + 2 * kMiB;  // its input, and temporaries of the update
  if (k == 1 && !graph) {  // gradients of parameters are allocated one by one
    for (int i = 0; i < kStages; ++i) {
      chain_costs.stages[size_t(i)].input_gradient_bytes +=
          (kStages - i) * 2 * kMiB;
    }
  } else {
    fixed += 12 * kMiB;  // a second gradient of the last stage's tied weights
    for (auto& stage : chain_costs.stages) stage.input_gradient_bytes += kMiB;
  }
  Window window;
  window.peak = std::max(fixed + simulate(schedule, chain_costs).peak_bytes,
                         48 * kMiB + b * 1000 + 2 * kMiB);
  window.ms = double(k - 1) * FakeCostSource::sum_ms(b, schedule) +
              FakeCostSource::sum_ms(rest, schedule) + 3;
  return window;
}

/// Returns a schedule of segments, given by one bit per boundary between two
/// stages.
inline Schedule cut(unsigned bits) {
  std::vector<int> starts{0};
  for (int i = 1; i < kStages; ++i) {
    if ((bits >> (i - 1)) & 1U) starts.push_back(i);
  }
  return make_segments("cut", kStages, starts);
}

}  // namespace reprise::testing
