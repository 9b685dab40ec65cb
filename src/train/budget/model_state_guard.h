#pragma once

#include "compat/cuda.h"
#include "compat/rng.h"
#include "train/step/train_setup.h"

#include <reprise/data/loader.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

/// Helpers for measurements that run the model of a training. Tested by
/// tests/train/budget/planning_test.cpp.
namespace reprise::detail {

/// Restores gradients, buffers and random generators when it is destroyed, and
/// with `parameters` the parameters as well.
class ModelStateGuard {
 public:
  ModelStateGuard(const TrainSetup& setup, bool parameters);
  ~ModelStateGuard();
  ModelStateGuard(const ModelStateGuard&) = delete;
  ModelStateGuard& operator=(const ModelStateGuard&) = delete;

 private:
  using Pair = std::pair<torch::Tensor, torch::Tensor>;
  std::shared_ptr<HostParameters> host_;  // may be null
  std::vector<Pair> gradients_;
  std::vector<Pair> values_;
  compat::RngState rng_;
};

/// Batches of one size, read by worker threads as in a training, so that the
/// workers use the same share of the CPU.
class Batches {
 public:
  /// `any` is returned by each next() if the data has fewer than `size`
  /// samples.
  Batches(const TrainSetup& setup, int64_t size, Batch any);
  Batch next();

 private:
  int64_t size_;
  Batch any_;
  std::optional<Loader> loader_;
};

/// Returns the median duration of `times` runs of `work` in milliseconds,
/// including its work on the device.
template <class Work>
double time_of(torch::Device device, int times, Work&& work) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> ms;
  for (int i = 0; i < times; ++i) {
    compat::synchronize(device);
    const auto start = Clock::now();
    work();
    compat::synchronize(device);
    ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start)
                     .count());
  }
  std::nth_element(ms.begin(), ms.begin() + times / 2, ms.end());
  return ms[static_cast<size_t>(times / 2)];
}

}  // namespace reprise::detail
