#pragma once

#include "compat/cuda.h"
#include "compat/cuda_graph.h"

#include <functional>
#include <memory>
#include <utility>

namespace reprise::bench {

/// Runs a step several times per call and waits for it. On CUDA, the steps are captured
/// in one CUDA graph, so that kernels are timed without launch overhead. Gradients that
/// the step accumulates into must exist before, so one step is run first.
class Repeated {
 public:
  Repeated(c10::Device device, int times, std::function<void()> step)
      : device_(device),
        stream_(device, device.is_cuda()),
        step_(std::move(step)),
        times_(times) {
    step_();
    step_();
    if (!device.is_cuda()) return;
    graph_ = std::make_unique<compat::CudaGraph>(
        device.index(), std::make_shared<compat::CudaGraphPool>());
    graph_->capture([this] { run(); });
  }
  Repeated(const Repeated&) = delete;
  Repeated& operator=(const Repeated&) = delete;

  void operator()() {
    if (!graph_) return run();
    graph_->replay();
    compat::cuda_synchronize(device_.index());
  }
  int times() const { return times_; }

 private:
  void run() {
    for (int i = 0; i < times_; ++i) step_();
  }

  c10::Device device_;
  compat::GraphStreamScope stream_;
  std::function<void()> step_;
  int times_;
  std::unique_ptr<compat::CudaGraph> graph_;
};

}  // namespace reprise::bench
