#pragma once

#include "compat/cuda.h"
#include "compat/cuda_graph.h"

#include <functional>
#include <memory>
#include <utility>

namespace reprise::bench {

/// A step that a call runs several times, and waits for. On CUDA that is one graph, so
/// that what is timed are the device's kernels and not their launches. Gradients that the
/// step adds to have to be there before, which one step sees to.
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
