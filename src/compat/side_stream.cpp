// Compiled with a LibTorch that has CUDA; cuda_none.cpp replaces it otherwise.
#include "compat/side_stream.h"

#include "compat/stream_event.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/engine.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

namespace reprise::compat {
namespace {

using c10::cuda::CUDAStream;

// Number of CaptureExpected with `expected`. Read by autograd's threads.
std::atomic<int> g_captures_expected{0};
// Incremented when the per-stream workspaces of libraries are freed.
std::atomic<int64_t> g_workspace_epoch{1};

/// The side stream of one main stream.
class SideStream {
 public:
  explicit SideStream(CUDAStream main)
      : main_(main),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false,
                                             main.device_index())) {}

  /// Returns false, without running `work`, if it should run on the main stream.
  bool run(std::vector<at::Tensor>& used, const std::function<void()>& work) {
    const std::lock_guard lock(mutex_);
    if (stream_ == main_) return false;
    const int64_t epoch = g_workspace_epoch;
    const bool allocates = epoch_ != epoch && g_captures_expected > 0;
    if (!allocates && capture_id(main_) == 0) return false;
    wait();
    at::cuda::CUDAEvent fork;
    fork.record(main_);
    fork.block(stream_);
    {
      const c10::cuda::CUDAStreamGuard guard(stream_);
      work();
    }
    done_.emplace(stream_);
    used_ = std::move(used);
    epoch_ = epoch;
    return true;
  }

  void join() {
    const std::lock_guard lock(mutex_);
    wait();
  }

 private:
  void wait() {
    if (done_) done_->block(main_);
    done_.reset();
    used_.clear();
  }

  std::mutex mutex_;
  CUDAStream main_, stream_;
  int64_t epoch_ = 0;                // g_workspace_epoch at the last use
  std::optional<StreamEvent> done_;  // end of the pending work, if there is any
  std::vector<at::Tensor> used_;
};

SideStream& side_stream_of(const CUDAStream& main) {
  static std::mutex mutex;
  // Never destroyed: threads may outlive static objects.
  static auto* all =
      new std::unordered_map<CUDAStream, std::unique_ptr<SideStream>>;
  const std::lock_guard lock(mutex);
  auto& side = (*all)[main];
  if (!side) side = std::make_unique<SideStream>(main);
  return *side;
}

}  // namespace

void run_on_side_stream(std::vector<at::Tensor> used,
                        const std::function<void()>& work) {
  if (used.empty() || !used[0].is_cuda()) return work();
  SideStream& side =
      side_stream_of(c10::cuda::getCurrentCUDAStream(used[0].device().index()));
  if (!side.run(used, work)) return work();
  // Queued every time: joining twice has no effect.
  torch::autograd::Engine::get_default_engine().queue_callback(
      [&side] { side.join(); });
}

CaptureExpected::CaptureExpected(bool expected) : expected_(expected) {
  if (expected_) ++g_captures_expected;
}

CaptureExpected::~CaptureExpected() {
  if (expected_) --g_captures_expected;
}

void reset_side_streams() {
  ++g_workspace_epoch;
}

}  // namespace reprise::compat
