#pragma once

#include "temporary.h"
#include "train/runs.h"

#include <reprise/plan/planner.h>
#include <reprise/train/config.h>

#include <cstdint>
#include <cstdlib>
#include <string>

namespace reprise::testing {

/// Redirects cached profiles to a temporary directory.
class OwnCache {
 public:
  OwnCache() { ::setenv("XDG_CACHE_HOME", folder_.path().c_str(), 1); }
  ~OwnCache() { ::unsetenv("XDG_CACHE_HOME"); }
  OwnCache(const OwnCache&) = delete;
  OwnCache& operator=(const OwnCache&) = delete;
  std::string profiles() const { return folder_.path() + "/reprise/profiles"; }

 private:
  TemporaryDirectory folder_;
};

/// Request for the batches of `config`; a batch of 0 is to be chosen.
inline PlanRequest request_for(const TrainConfig& config, int64_t memory) {
  PlanRequest request;
  request.global_batch = config.global_batch;
  request.micro_batch = config.batch;
  request.memory = memory;
  request.precisions = {config.precision};
  return request;
}

/// Expects a training within `memory` to give the results of one without a budget, without
/// warnings, within the budget, and with a peak as predicted. Returns its summary.
inline TrainSummary expect_trains_within(const TrainConfig& config,
                                         int64_t memory) {
  TrainConfig limited = config;
  limited.memory_limit = memory;
  Warnings warnings;
  const auto tight = run(limited, {}, &warnings);
  expect_same(tight, run(config), "within a budget");
  const TrainSummary& summary = tight.result.summary;
  EXPECT_LE(summary.peak_bytes, memory);
  EXPECT_TRUE(warnings.list.empty());
  EXPECT_TRUE(summary.predicted.has_value());
  if (summary.predicted) {
    EXPECT_NEAR(static_cast<double>(summary.predicted->peak_bytes) /
                    static_cast<double>(summary.peak_bytes),
                1, 0.03);
  }
  return summary;
}

}  // namespace reprise::testing
