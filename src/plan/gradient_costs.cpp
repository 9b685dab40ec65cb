#include "plan/gradient_costs.h"

#include "plan/update_cuts.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace reprise::detail {
namespace {

/// Applies `change` to the stage itself and to its variants.
template <class Change>
void for_each_run(StageCosts& stage, const Change& change) {
  change(stage);
  for (auto& variant : stage.variants) change(variant);
}

int64_t total_of(const std::vector<int64_t>& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
}

void include_new_gradients(StageCosts& stage) {
  for_each_run(stage, [](KeptRunCosts& run) {
    run.backward_extra_bytes =
        std::max(run.backward_extra_bytes, run.first_backward_extra_bytes);
  });
}

/// Adds parameters that are gathered from other ranks: those of a stage and of the next one are
/// there, and a stage waits for them if they take longer than the one before.
void add_gathered(ChainCosts& chain_costs, const CostProfile& profile) {
  const auto& weights = profile.moved_bytes;
  const auto& wire =
      profile.stage_wire_bytes.empty() ? weights : profile.stage_wire_bytes;
  const size_t n = chain_costs.stages.size();
  const auto ms_of = [&](int64_t bytes) {
    const double rate = profile.to_device_bytes_per_ms;
    return bytes > 0 && rate > 0
               ? static_cast<double>(bytes) / rate + profile.gather_delay_ms
               : 0;
  };
  for (size_t i = 0; i < n; ++i) {
    const int64_t before = i > 0 ? weights[i - 1] : 0;
    const int64_t after = i + 1 < n ? weights[i + 1] : 0;
    const double before_ms = ms_of(i > 0 ? wire[i - 1] : 0);
    const double after_ms = ms_of(i + 1 < n ? wire[i + 1] : 0);
    StageCosts& stage = chain_costs.stages[i];
    stage.drop_extra_bytes += weights[i] + std::max(before, after);
    for_each_run(stage, [&](KeptRunCosts& run) {
      run.keep_extra_bytes += weights[i] + std::max(before, after);
      run.backward_extra_bytes += weights[i] + before;
      run.forward_ms = std::max(run.forward_ms, after_ms);
      run.unused_output_ms =
          std::min(run.unused_output_ms, run.forward_ms - after_ms);
      run.backward_ms = std::max(run.backward_ms, before_ms);
    });
  }
}

/// Adds buckets that are on the way to other ranks, and subtracts gradients that have left.
/// Unless it is the `first` micro-batch of a window, those before it have their gradients all
/// the time.
void add_exchange(ChainCosts& chain_costs, const CostProfile& profile,
                  bool first) {
  const ExchangeMemory& exchange = profile.exchange;
  if (exchange.empty()) return;
  for (size_t i = chain_costs.stages.size(); i-- > 0;) {
    const int64_t change = exchange.change_at(i);
    const int64_t counted = first ? change : std::max<int64_t>(0, change);
    chain_costs.stages[i].input_gradient_bytes += counted;
    if (i == 0) break;
    int64_t peak = exchange.change_at(i + 1) + exchange.peak.at(i) - counted;
    if (profile.gathers_parameters) {
      // They are those of this stage and of the next one; see add_gathered().
      peak += profile.moved_bytes[i] - (i > 1 ? profile.moved_bytes[i - 2] : 0);
    }
    for_each_run(chain_costs.stages[i - 1], [&](KeptRunCosts& run) {
      run.backward_extra_bytes = std::max(run.backward_extra_bytes, peak);
    });
  }
}

/// Adds parameters that are in host memory. While a stage runs, they are on the device with
/// those of the next one; in the backward, unless it is the `first` of a window, with the
/// gradients so far. What the backward leaves is on its way to the host during the next one.
/// Copies take place meanwhile, and the stage waits for them if they take longer.
void add_moved(ChainCosts& chain_costs, const CostProfile& profile,
               bool first) {
  if (!profile.moves_parameters()) return;
  if (profile.gathers_parameters) return add_gathered(chain_costs, profile);
  const auto& weights = profile.moved_bytes;
  const auto& sums = profile.moved_gradient_bytes;
  const size_t n = chain_costs.stages.size();
  const auto ms_of = [](int64_t bytes, double rate) {
    return rate > 0 ? static_cast<double>(bytes) / rate : 0;
  };
  int64_t output_gradient = chain_costs.output_gradient_bytes;
  for (size_t i = n; i-- > 0;) {
    StageCosts& stage = chain_costs.stages[i];
    const int64_t before = i > 0 ? weights[i - 1] : 0;
    const int64_t after = i + 1 < n ? weights[i + 1] : 0;
    const int64_t sum = first ? 0 : sums[i];
    const int64_t sum_before = first || i == 0 ? 0 : sums[i - 1];
    const int64_t here = weights[i] + sum;
    const int64_t next = before + sum_before;
    // Gradients live until the update of the next stage begins.
    const int64_t left = weights[i] + sums[i];
    // The update follows that of the stage after, whose gradients are freed.
    const int64_t update = stage.input_gradient_bytes + here + next +
                           (first ? sums[i] : 0) +
                           profile.stage_update_bytes.at(i) - output_gradient -
                           (i + 1 < n ? sums[i + 1] : 0);
    stage.drop_extra_bytes += here + std::max(after, next);
    for_each_run(stage, [&](KeptRunCosts& run) {
      run.keep_extra_bytes += here + std::max(after, next);
      run.backward_extra_bytes = std::max(
          run.backward_extra_bytes + here + next, update - run.saved_bytes);
      const double copy_ms = ms_of(after, profile.to_device_bytes_per_ms);
      run.forward_ms = std::max(run.forward_ms, copy_ms);
      run.unused_output_ms =
          std::min(run.unused_output_ms, run.forward_ms - copy_ms);
      run.backward_ms = std::max({run.backward_ms,
                                  ms_of(next, profile.to_device_bytes_per_ms),
                                  ms_of(left, profile.to_host_bytes_per_ms)});
    });
    output_gradient = stage.input_gradient_bytes;
    stage.input_gradient_bytes += left;
  }
}

}  // namespace

ChainCosts accumulating_costs(ChainCosts chain_costs,
                              const CostProfile& profile, bool first) {
  // Gradients are rounded and freed as in an update, which the last micro-batch has.
  if (profile.half_gradients) {
    return updating_costs(std::move(chain_costs), profile);
  }
  const auto& added = first ? profile.gradient_bytes : profile.held_twice_bytes;
  // They are added to the gradients of activations, because both depend only on the
  // backward's progress.
  int64_t so_far = 0;
  for (size_t i = chain_costs.stages.size(); i-- > 0;) {
    StageCosts& stage = chain_costs.stages[i];
    so_far += added.at(i);
    stage.input_gradient_bytes += so_far;
    if (first) include_new_gradients(stage);
  }
  add_exchange(chain_costs, profile, first);
  add_moved(chain_costs, profile, first);
  return chain_costs;
}

ChainCosts updating_costs(ChainCosts chain_costs, const CostProfile& profile) {
  const std::vector<int> cuts = update_cuts(profile.final_gradient_bytes);
  int64_t live = 0, complete = 0;
  int64_t output_gradient = chain_costs.output_gradient_bytes;
  // Of the outputs of stages that are cut together, held until the backward of all of them has
  // ended if they are small. The last of these stages may free them earlier otherwise.
  const int64_t most_held =
      most_held_bytes(total_of(profile.final_gradient_bytes) +
                      total_of(profile.moved_gradient_bytes));
  int64_t held = 0, next_held = output_gradient;
  bool after_cut = true;
  for (size_t i = chain_costs.stages.size(); i-- > 0;) {
    StageCosts& stage = chain_costs.stages[i];
    include_new_gradients(stage);
    if (after_cut) held = next_held <= most_held ? next_held : 0;
    for_each_run(stage,
                 [&](KeptRunCosts& run) { run.backward_extra_bytes += held; });
    next_held = stage.input_gradient_bytes;
    live += profile.gradient_bytes.at(i);
    complete += profile.final_gradient_bytes.at(i);
    const bool updates = i == 0 || std::find(cuts.begin(), cuts.end(),
                                             static_cast<int>(i)) != cuts.end();
    after_cut = updates || profile.moves_parameters();
    if (updates) {
      // The update follows the backward, when the stage's activations are freed.
      const int64_t bytes = stage.input_gradient_bytes + live +
                            profile.stage_update_bytes.at(i) - output_gradient;
      for_each_run(stage, [&](KeptRunCosts& run) {
        run.backward_extra_bytes =
            std::max(run.backward_extra_bytes, bytes - run.saved_bytes);
      });
      live -= std::exchange(complete, 0);
    }
    stage.input_gradient_bytes += live;
    output_gradient = stage.input_gradient_bytes;
  }
  add_moved(chain_costs, profile, /*first=*/true);
  return chain_costs;
}

int graphs_of_updates(const CostProfile& profile) {
  if (profile.moves_parameters()) {
    return static_cast<int>(profile.stages.size());
  }
  return static_cast<int>(update_cuts(profile.final_gradient_bytes).size()) + 1;
}

}  // namespace reprise::detail
