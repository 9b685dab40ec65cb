#include "recompute/stage_visits.h"

namespace reprise::detail {

std::vector<StageVisit> stage_visits(const Schedule& schedule) {
  std::vector<StageVisit> visits;
  for (const Op& op : schedule.ops()) {
    if (op.kind == OpKind::kDiscard || op.kind == OpKind::kFetch) continue;
    if (visits.empty() || visits.back().stage != op.stage) {
      visits.push_back({op.stage, false});
    }
    if (op.kind == OpKind::kBackward) visits.back().backward = true;
  }
  return visits;
}

}  // namespace reprise::detail
