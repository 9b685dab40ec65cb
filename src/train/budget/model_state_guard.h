#pragma once

#include "compat/rng.h"
#include "train/step/train_setup.h"

#include <reprise/data/loader.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

/// What measuring the costs of a training works with.
namespace reprise::detail {

/// Puts gradients, buffers, parameters and random generators back.
class ModelStateGuard {
 public:
  ModelStateGuard(const Model& model, torch::Device device, bool parameters);
  ~ModelStateGuard();
  ModelStateGuard(const ModelStateGuard&) = delete;
  ModelStateGuard& operator=(const ModelStateGuard&) = delete;

 private:
  using Pair = std::pair<torch::Tensor, torch::Tensor>;
  std::vector<Pair> gradients_;
  std::vector<Pair> values_;
  compat::RngState rng_;
};

/// Batches of one size, read as a training reads them: its workers take their
/// share of the host.
class Batches {
 public:
  /// `any`: handed out again and again where the data has too few samples.
  Batches(const TrainSetup& setup, int64_t size, Batch any);
  Batch next();

 private:
  int64_t size_;
  Batch any_;
  std::optional<Loader> loader_;
};

/// Until the device has done its work.
void wait_for(torch::Device device);

/// Milliseconds that `work` takes, the device's part included: the median.
template <class Work>
double time_of(torch::Device device, int times, Work&& work) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> ms;
  for (int i = 0; i < times; ++i) {
    wait_for(device);
    const auto start = Clock::now();
    work();
    wait_for(device);
    ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start)
                     .count());
  }
  std::nth_element(ms.begin(), ms.begin() + times / 2, ms.end());
  return ms[static_cast<size_t>(times / 2)];
}

}  // namespace reprise::detail
