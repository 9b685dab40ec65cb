// Compiled against a LibTorch with CUDA; cuda_none.cpp stands in otherwise.
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

// Of CaptureExpected. Read by autograd's threads.
std::atomic<int> g_captures_expected{0};
// Rises when libraries let go of what they keep for streams.
std::atomic<int64_t> g_setup{1};

/// Beside one stream of backwards.
class SecondStream {
 public:
  explicit SecondStream(CUDAStream main)
      : main_(main),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false,
                                             main.device_index())) {}

  /// False: nothing was done, this is not the time.
  bool run(std::vector<at::Tensor>& used, const std::function<void()>& work) {
    const std::lock_guard lock(mutex_);
    if (stream_ == main_) return false;
    const int64_t setup = g_setup;
    const bool to_set_up = setup_ != setup && g_captures_expected > 0;
    if (!to_set_up && capture_id(main_) == 0) return false;
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
    setup_ = setup;
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
  int64_t setup_ = 0;                // of g_setup, when it was used last
  std::optional<StreamEvent> done_;  // of what runs, if anything does
  std::vector<at::Tensor> used_;
};

SecondStream& beside(const CUDAStream& main) {
  static std::mutex mutex;
  // Outlives every thread.
  static auto* all =
      new std::unordered_map<CUDAStream, std::unique_ptr<SecondStream>>;
  const std::lock_guard lock(mutex);
  auto& second = (*all)[main];
  if (!second) second = std::make_unique<SecondStream>(main);
  return *second;
}

}  // namespace

void run_beside(std::vector<at::Tensor> used,
                const std::function<void()>& work) {
  if (used.empty() || !used[0].is_cuda()) return work();
  SecondStream& second =
      beside(c10::cuda::getCurrentCUDAStream(used[0].device().index()));
  if (!second.run(used, work)) return work();
  // Every time: the second of two joins finds nothing to do.
  torch::autograd::Engine::get_default_engine().queue_callback(
      [&second] { second.join(); });
}

CaptureExpected::CaptureExpected(bool expected) : expected_(expected) {
  if (expected_) ++g_captures_expected;
}

CaptureExpected::~CaptureExpected() {
  if (expected_) --g_captures_expected;
}

void forget_streams_beside() {
  ++g_setup;
}

}  // namespace reprise::compat
