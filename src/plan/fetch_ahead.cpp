#include "plan/fetch_ahead.h"

#include <optional>
#include <utility>
#include <vector>

namespace reprise::detail {
namespace {

/// Returns the index in `ops` at which to insert the fetch of a stage: that of
/// the last backward before its own, if the stage is kept by then.
std::optional<size_t> fetch_index(const std::vector<Op>& ops, int stage) {
  std::optional<size_t> kept, before;
  for (size_t i = 0; i < ops.size(); ++i) {
    const Op& op = ops[i];
    if (op.kind == OpKind::kForwardKeep && op.stage == stage) kept = i;
    if (op.kind != OpKind::kBackward) continue;
    if (op.stage == stage) break;
    before = i;
  }
  if (!before || !kept || *kept > *before) return std::nullopt;
  return before;
}

}  // namespace

Schedule fetch_ahead(const Schedule& schedule, const ChainCosts& chain_costs,
                     int64_t bytes) {
  Schedule best = schedule;
  for (const Op& op : schedule.ops()) {
    if (op.kind != OpKind::kForwardKeep) continue;
    const auto& stage = chain_costs.stages.at(static_cast<size_t>(op.stage));
    if (stage.kept_run(op.variant).host_bytes == 0) continue;
    std::vector<Op> ops = best.ops();
    const auto index = fetch_index(ops, op.stage);
    if (!index) continue;
    ops.insert(ops.begin() + static_cast<std::ptrdiff_t>(*index),
               {OpKind::kFetch, op.stage});
    Schedule with(schedule.name(), schedule.stages(), std::move(ops));
    if (simulate(with, chain_costs).peak_bytes <= bytes) best = std::move(with);
  }
  return best;
}

}  // namespace reprise::detail
