// Configurations, values of the command line, and costs that a cluster is planned with.
#include "target.h"

#include <reprise/base/error.h>
#include <reprise/plan/cluster.h>
#include <reprise/train/config.h>
#include <reprise/train/fields.h>

#include <iterator>

namespace reprise::fuzz {
namespace {

void run_cluster(const std::string&, const std::string& input) {
  const CostProfile profile = profile_from_json(input);
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

void run_config(const std::string&, const std::string& input) {
  TrainConfig config = config_from_json(input);
  config.share_among(3);
  config_fields().check(config);
  (void)conflict(config, TrainConfig());
  (void)to_json(config);
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
      {.name = "cluster", .file = "", .run = run_cluster, .corpus = "profile"},
      {.name = "config", .file = "", .run = run_config},
      {.name = "flag", .file = "", .run = run_flag},
  };
}

}  // namespace reprise::fuzz
