// Formats that a caller reads from a file and parses as text: costs, plans, configurations,
// summaries; and values of the command line.
#include "base/text_check.h"
#include "target.h"

#include <reprise/base/bytes.h>
#include <reprise/base/error.h>
#include <reprise/plan/cluster.h>
#include <reprise/plan/planner.h>
#include <reprise/recompute/simulate.h>
#include <reprise/recompute/strategy.h>
#include <reprise/train/config.h>
#include <reprise/train/fields.h>
#include <reprise/train/summary.h>

#include <iterator>

namespace reprise::fuzz {
namespace {

Schedule keep_all(int stages) {
  std::vector<Op> ops;
  for (int i = 0; i < stages; ++i) ops.push_back({OpKind::kForwardKeep, i});
  for (int i = stages; i-- > 0;) ops.push_back({OpKind::kBackward, i});
  return Schedule("all", stages, ops);
}

/// What is accepted can be planned with.
void run_profile(const std::string&, const std::string& input) {
  CostProfile profile = profile_from_json(input);
  if (profile.sizes.empty()) return;
  for (const int64_t size : {1, 3, 1000}) {
    const ChainCosts costs = profile.at(size).chain_costs;
    if (costs.stages.empty()) return;
    (void)simulate(keep_all(static_cast<int>(costs.stages.size())), costs);
  }
  if (choice_of(input, 64) != 0) return;
  const auto costs = saved_costs(input);
  ClusterRequest request;
  request.plan.memory = int64_t{1} << 30;
  request.plan.global_batch = 8;
  request.plan.precisions = {profile.precision};
  request.ranks = 2;
  request.network = {.bytes_per_ms = 1e6, .latency_ms = 0.01};
  (void)plan_cluster(request, *costs);
}

void run_plan(const std::string&, const std::string& input) {
  const Plan plan = plan_from_json(input, 4);
  (void)to_json(plan);
}

void run_config(const std::string&, const std::string& input) {
  TrainConfig config = config_from_json(input);
  config.share_among(3);
  config_fields().check(config);
  (void)conflict(config, TrainConfig());
  (void)to_json(config);
}

void run_summary(const std::string&, const std::string& input) {
  const TrainSummary summary = summary_from_json(input);
  (void)compare(summary, summary);
  (void)to_table(summary);
  (void)to_json(summary);
}

void run_schedule(const std::string&, const std::string& input) {
  const int stages = 1 + static_cast<int>(choice_of(input, 6));
  if (is_schedule_text(input) || choice_of(input, 2) == 0) {
    (void)Schedule::parse("fuzz", stages, input).to_string();
  } else {
    (void)make_schedule(input, stages);
  }
}

void run_bytes(const std::string&, const std::string& input) {
  (void)byte_size(1)(input);
  (void)format_bytes(parse_bytes(input));
}

/// "flag value".
void run_flag(const std::string&, const std::string& input) {
  const size_t space = input.find(' ');
  const std::string name = input.substr(0, space);
  const std::string value =
      space == std::string::npos ? "" : input.substr(space + 1);
  const auto& fields = config_fields();
  const auto* field = fields.find(name);
  if (field == nullptr) {  // any of them
    field = &*std::next(fields.begin(),
                        static_cast<int64_t>(choice_of(input, fields.size())));
  }
  if (field->check) {
    const std::string error = field->check(value);
    if (!error.empty()) throw Error(error);
  }
  TrainConfig config;
  field->set(config, value);
  fields.check(config);
  (void)to_json(config);
}

}  // namespace

std::vector<Target> text_targets() {
  return {
      {.name = "profile", .file = "", .run = run_profile},
      {.name = "plan", .file = "", .run = run_plan},
      {.name = "config", .file = "", .run = run_config},
      {.name = "summary", .file = "", .run = run_summary},
      {.name = "schedule", .file = "", .run = run_schedule},
      {.name = "bytes", .file = "", .run = run_bytes},
      {.name = "flag", .file = "", .run = run_flag},
  };
}

}  // namespace reprise::fuzz
