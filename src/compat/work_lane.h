#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace reprise::compat {

/// Runs work beside that of the current stream: on CUDA, on a stream of its own; on the CPU,
/// immediately. Not thread-safe. Tested by tests/compat/work_lane_test.cpp.
class WorkLane {
 public:
  virtual ~WorkLane() = default;

  /// Runs `work`, which may use what was submitted to the current stream before. `used` are
  /// tensors of the current stream that it reads or writes; they are kept alive until join().
  virtual void run(std::vector<at::Tensor> used,
                   const std::function<void()>& work) = 0;

  /// Makes the current stream wait for all work but that of the last `remaining` calls of
  /// run().
  virtual void join(size_t remaining) = 0;

  /// Makes the lane's stream the current one until the result is destroyed.
  virtual std::shared_ptr<void> enter() = 0;
};

std::unique_ptr<WorkLane> make_work_lane(at::Device device);

/// The lane of the CPU. Keeps tensors as long as others do, so that plans need not distinguish
/// them.
class ImmediateLane final : public WorkLane {
 public:
  void run(std::vector<at::Tensor> used,
           const std::function<void()>& work) override {
    used_.push_back(std::move(used));
    work();
  }
  void join(size_t remaining) override {
    while (used_.size() > remaining) used_.pop_front();
  }
  std::shared_ptr<void> enter() override { return nullptr; }

 private:
  std::deque<std::vector<at::Tensor>> used_;
};

}  // namespace reprise::compat
