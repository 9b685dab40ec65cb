// Compiled against a LibTorch with CUDA; cuda_none.cpp replaces it otherwise.
//
// Note [Random numbers in CUDA graphs]
// While a graph is captured, LibTorch passes kernels a pointer to the
// generator's position at the start of the graph, which is set at each replay,
// and their offset from it. A stage that is recomputed must use the offsets of
// its first run, and the generator's offset must be restored afterwards.
// LibTorch's interface only exchanges whole generator states, which must be
// registered before the capture, when their number is unknown, and which are
// advanced at every replay. The offset is a plain field of the state that the
// graph holds, so setting it is sufficient.
#include "compat/cuda_graph.h"

#include "compat/cuda.h"
#include "compat/side_stream.h"

#include <reprise/version.h>

#include <c10/util/Exception.h>
#include <torch/version.h>

// Earlier versions have CUDA graphs too, but have not been tested.
#define REPRISE_HAS_GRAPHS    \
  (TORCH_VERSION_MAJOR > 2 || \
   (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 11))

#if REPRISE_HAS_GRAPHS

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <array>
#include <atomic>
#include <mutex>
#include <utility>

namespace reprise::compat {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

/// A generator state whose offset inside a CUDA graph can be read and set.
template <class State>
concept HasRngOffset = requires(State& state) {
  state.offset_intragraph_ += uint64_t{4};
  state.capturing_ = false;
};
constexpr bool kRngOffsetAccessible = HasRngOffset<at::CUDAGeneratorState>;

template <class State>
uint64_t& rng_offset_of(State& state) {
  if constexpr (HasRngOffset<State>) {
    return state.offset_intragraph_;
  } else {
    TORCH_CHECK(false, "[CudaGraph] ", cuda_graph_unavailable_reason());
  }
}

template <class State>
void end_capturing(State& state) {
  if constexpr (HasRngOffset<State>) state.capturing_ = false;
}

/// Later versions also have a pool of pinned memory per capture.
template <class Allocator, class Id>
void end_host_pool(Allocator* allocator, const Id& id) {
  if constexpr (requires { allocator->end_allocate_to_pool(id); }) {
    allocator->end_allocate_to_pool(id);
  }
}

/// Runs `body` during the handling of another exception and ignores its own.
template <class F>
void ignore_errors(F&& body) noexcept {
  try {
    body();
  } catch (...) {
  }
}

/// LibTorch's CUDA graph, with cleanup after a failed capture. LibTorch would
/// leave the allocator and the generator in the capturing state.
class Recording final : public at::cuda::CUDAGraph {
 public:
  Recording() { ++count_; }
  ~Recording() { --count_; }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  static bool any_exists() { return count_ > 0; }

  void begin(c10::MempoolId_t pool) {
    began_ = true;
    // Data loader threads pin memory meanwhile, which would invalidate a
    // capture in the global mode.
    capture_begin(pool, cudaStreamCaptureModeThreadLocal);
  }

  void abandon() noexcept {
    if (!began_ || capture_ended_) return;
    ignore_errors([&] {
      // Reports the failure again, and ends the capturing state of the stream.
      cudaGraph_t broken = nullptr;
      (void)cudaStreamEndCapture(capture_stream_, &broken);
      if (broken != nullptr) (void)cudaGraphDestroy(broken);
      (void)cudaGetLastError();
    });
    for (auto& [state, increment] : captured_generator_states_) {
      end_capturing(*state);
    }
    ignore_errors([&] {
      // Throws if the pool was not in use yet; there is nothing to release
      // then.
      caching::endAllocateToPool(capture_dev_, mempool_id_);
      capture_ended_ = true;  // makes the destructor release the pool
      end_host_pool(at::getHostAllocator(at::kCUDA), mempool_id_);
    });
  }

  /// Offset of the device's default generator.
  uint64_t& rng_offset() {
    TORCH_CHECK(captured_generator_states_.size() == 1,
                "[CudaGraph] expected one generator in a CUDA graph, got ",
                captured_generator_states_.size());
    return rng_offset_of(*captured_generator_states_.begin()->first);
  }

  bool is_on(c10::Device device) const {
    return device.is_cuda() && device.index() == capture_dev_;
  }

 private:
  static inline std::atomic<int> count_ = 0;
  bool began_ = false;
};

// The capture in progress. Also read by autograd's threads, which run parts of
// it.
std::atomic<Recording*> g_capturing{nullptr};

class CapturingGuard {
 public:
  explicit CapturingGuard(Recording& recording) {
    Recording* none = nullptr;
    TORCH_CHECK(g_capturing.compare_exchange_strong(none, &recording),
                "[CudaGraph::capture] another capture is in progress");
  }
  ~CapturingGuard() { g_capturing = nullptr; }
  CapturingGuard(const CapturingGuard&) = delete;
  CapturingGuard& operator=(const CapturingGuard&) = delete;
};

Recording* recording_for(const at::Generator& generator) {
  Recording* recording = g_capturing.load();
  // Outside of captures, only the first test is evaluated.
  if (recording == nullptr || !recording->is_on(generator.device())) {
    return nullptr;
  }
  const c10::cuda::CUDAGuard guard(generator.device());
  const auto status = c10::cuda::currentStreamCaptureStatusMayInitCtx();
  return status == c10::cuda::CaptureStatus::None ? nullptr : recording;
}

/// Returns the device's stream for CUDA graphs.
c10::cuda::CUDAStream stream_of(c10::DeviceIndex device) {
  static std::mutex mutex;
  static std::array<std::optional<c10::cuda::CUDAStream>,
                    C10_COMPILE_TIME_MAX_GPUS>
      streams;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& stream = streams.at(static_cast<size_t>(device));
  if (!stream) {
    stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device);
  }
  return *stream;
}

void wait_for(const c10::cuda::CUDAStream& before,
              const c10::cuda::CUDAStream& after) {
  at::cuda::CUDAEvent event;
  event.record(before);
  event.block(after);
}

}  // namespace

std::string cuda_graph_unavailable_reason() {
  if constexpr (kRngOffsetAccessible) return {};
  return "LibTorch " + libtorch_version() +
         " does not expose the offset of random numbers in a CUDA graph";
}

struct GraphStreamScope::Impl {
  c10::cuda::CUDAStream before, own;
};

GraphStreamScope::GraphStreamScope(c10::Device device, bool enter) {
  if (!enter || !device.is_cuda()) return;
  const c10::DeviceIndex index =
      device.has_index() ? device.index() : c10::cuda::current_device();
  const auto before = c10::cuda::getCurrentCUDAStream(index);
  const auto own = stream_of(index);
  if (before == own) return;
  wait_for(before, own);
  c10::cuda::setCurrentCUDAStream(own);
  impl_.reset(new Impl{before, own});
}

GraphStreamScope::~GraphStreamScope() {
  if (!impl_) return;
  ignore_errors([&] { wait_for(impl_->own, impl_->before); });
  ignore_errors([&] { c10::cuda::setCurrentCUDAStream(impl_->before); });
}

bool release_workspaces(c10::Device device) {
  if (!device.is_cuda()) return true;
  if (Recording::any_exists()) return false;
  const c10::cuda::CUDAGuard guard(device);
  c10::cuda::device_synchronize();
  at::cuda::clearCublasWorkspaces();
  reset_side_streams();
  return true;
}

struct CudaGraphPool::Impl {
  c10::MempoolId_t id = at::cuda::graph_pool_handle();
};
CudaGraphPool::CudaGraphPool() : impl_(std::make_unique<Impl>()) {}
CudaGraphPool::~CudaGraphPool() = default;

struct CudaGraph::Impl {
  c10::DeviceIndex device;
  std::shared_ptr<CudaGraphPool> pool;
  std::unique_ptr<Recording> recording;  // null before capture()
  int64_t bytes = 0;
};

CudaGraph::CudaGraph(int device, std::shared_ptr<CudaGraphPool> pool)
    : impl_(new Impl{static_cast<c10::DeviceIndex>(device), std::move(pool),
                     nullptr, 0}) {
  TORCH_CHECK(impl_->pool, "[CudaGraph] expected a pool, got none");
}

CudaGraph::~CudaGraph() {
  if (!impl_->recording) return;
  ignore_errors([&] {
    const c10::cuda::CUDAGuard guard(impl_->device);
    c10::cuda::device_synchronize();
    impl_->recording.reset();
  });
}

void CudaGraph::capture(const std::function<void()>& body) {
  const std::string reason = cuda_graph_unavailable_reason();
  TORCH_CHECK(reason.empty(), "[CudaGraph::capture] ", reason);
  TORCH_CHECK(
      !impl_->recording,
      "[CudaGraph::capture] expected a new CUDA graph, got one that was "
      "captured before");
  const c10::cuda::CUDAGuard guard(impl_->device);
  TORCH_CHECK(
      c10::cuda::getCurrentCUDAStream() != c10::cuda::getDefaultCUDAStream(),
      "[CudaGraph::capture] expected a stream other than the default "
      "stream; use a GraphStreamScope");
  caching::emptyCache();
  const int64_t before = cuda_memory(impl_->device).reserved;
  auto recording = std::make_unique<Recording>();
  try {
    const CapturingGuard capturing(*recording);
    recording->begin(impl_->pool->impl_->id);
    body();
    recording->capture_end();
  } catch (...) {
    recording->abandon();
    throw;
  }
  impl_->recording = std::move(recording);
  impl_->bytes = cuda_memory(impl_->device).reserved - before;
}

void CudaGraph::replay() {
  TORCH_CHECK(impl_->recording,
              "[CudaGraph::replay] expected a call of capture() before");
  const c10::cuda::CUDAGuard guard(impl_->device);
  impl_->recording->replay();
}

int64_t CudaGraph::bytes() const {
  return impl_->bytes;
}

bool is_capturing() {
  return g_capturing.load() != nullptr;
}

std::optional<uint64_t> captured_rng_offset(const at::Generator& generator) {
  Recording* recording = recording_for(generator);
  if (recording == nullptr) return std::nullopt;
  return recording->rng_offset();
}

void set_captured_rng_offset(const at::Generator& generator,
                             uint64_t position) {
  Recording* recording = recording_for(generator);
  TORCH_CHECK(recording != nullptr,
              "[RngState] a state recorded inside a capture was restored "
              "outside of it");
  recording->rng_offset() = position;
}

}  // namespace reprise::compat

#else

#include "compat/cuda_graph_none.h"

namespace reprise::compat {

std::string cuda_graph_unavailable_reason() {
  return "CUDA graphs need LibTorch 2.11 or later, this is " +
         libtorch_version();
}

}  // namespace reprise::compat

#endif
