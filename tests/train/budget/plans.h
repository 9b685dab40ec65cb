#pragma once

#include "temporary.h"

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

}  // namespace reprise::testing
