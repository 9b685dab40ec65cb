#include "plan/fetch_ahead.h"

#include <optional>
#include <utility>
#include <vector>

namespace reprise::detail {
namespace {

/// Where in `ops` the fetch of a stage would stand: before the backward before its own,
/// if its graph is there by then.
std::optional<size_t> place_of_fetch(const std::vector<Op>& ops, int stage) {
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

Schedule fetch_ahead(const Schedule& schedule, const ChainCosts& figures,
                     int64_t bytes) {
  Schedule best = schedule;
  for (const Op& op : schedule.ops()) {
    if (op.kind != OpKind::kForwardKeep) continue;
    const auto& stage = figures.stages.at(static_cast<size_t>(op.stage));
    if (stage.kept_as(op.variant).host_bytes == 0) continue;
    std::vector<Op> ops = best.ops();
    const auto place = place_of_fetch(ops, op.stage);
    if (!place) continue;
    ops.insert(ops.begin() + static_cast<std::ptrdiff_t>(*place),
               {OpKind::kFetch, op.stage});
    Schedule with(schedule.name(), schedule.stages(), std::move(ops));
    if (simulate(with, figures).peak_bytes <= bytes) best = std::move(with);
  }
  return best;
}

}  // namespace reprise::detail
