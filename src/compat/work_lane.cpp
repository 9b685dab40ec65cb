// Compiled with a LibTorch that has CUDA; cuda_none.cpp replaces it otherwise.
#include "compat/work_lane.h"

#include "compat/stream_event.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <deque>
#include <utility>

namespace reprise::compat {
namespace {

using c10::cuda::CUDAStream;

class CudaLane final : public WorkLane {
 public:
  explicit CudaLane(c10::DeviceIndex device)
      : device_(device),
        stream_(
            c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device)) {}
  ~CudaLane() override {
    // Does not throw: CUDA may be shut down at process exit.
    (void)cudaStreamSynchronize(stream_);
    (void)cudaGetLastError();
  }

  void run(std::vector<at::Tensor> used,
           const std::function<void()>& work) override {
    const CUDAStream main = c10::cuda::getCurrentCUDAStream(device_);
    at::cuda::CUDAEvent fork;
    fork.record(main);
    fork.block(stream_);
    // Also if `work` throws, part of it may have been submitted.
    done_.push_back({std::move(used), nullptr});
    {
      const c10::cuda::CUDAStreamGuard guard(stream_);
      work();
    }
    done_.back().end = std::make_unique<StreamEvent>(stream_);
  }

  void join(size_t remaining) override {
    const CUDAStream main = c10::cuda::getCurrentCUDAStream(device_);
    while (done_.size() > remaining) {
      Work& oldest = done_.front();
      if (!oldest.end) oldest.end = std::make_unique<StreamEvent>(stream_);
      oldest.end->block(main);
      done_.pop_front();
    }
  }

  std::shared_ptr<void> enter() override {
    return std::make_shared<c10::cuda::CUDAStreamGuard>(stream_);
  }

 private:
  struct Work {
    std::vector<at::Tensor> used;
    std::unique_ptr<StreamEvent> end;  // null if it has failed
  };
  c10::DeviceIndex device_;
  CUDAStream stream_;
  std::deque<Work> done_;
};

}  // namespace

std::unique_ptr<WorkLane> make_work_lane(at::Device device) {
  if (!device.is_cuda()) return std::make_unique<ImmediateLane>();
  return std::make_unique<CudaLane>(device.index());
}

}  // namespace reprise::compat
