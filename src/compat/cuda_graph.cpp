// Compiled against a LibTorch with CUDA; cuda_none.cpp stands in otherwise.
//
// Random numbers. While a graph is captured, LibTorch hands kernels a pointer to
// the generator's position at the graph's start, filled in at each replay, and
// their distance from it. A stage that is recomputed must get the distances of its
// first run again, and the generator must afterwards stand where it stood. LibTorch
// offers only whole generator states to exchange, registered before the capture
// when nobody knows how many it takes, and kept in step at every replay. The
// distance itself is a plain field of the state that the graph holds: put back, it
// does all that.
#include "compat/cuda_graph.h"

#include "compat/cuda.h"
#include "compat/side_stream.h"

#include <reprise/version.h>

#include <c10/util/Exception.h>
#include <torch/version.h>

// Earlier versions have graphs too, but what is used here was never tried there.
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

/// A state of a generator whose place inside a graph can be read and set.
template <class State>
concept PlacedState = requires(State& state) {
  state.offset_intragraph_ += uint64_t{4};
  state.capturing_ = false;
};
constexpr bool kPlaced = PlacedState<at::CUDAGeneratorState>;

template <class State>
uint64_t& place_of(State& state) {
  if constexpr (PlacedState<State>) {
    return state.offset_intragraph_;
  } else {
    TORCH_CHECK(false, "[CudaGraph] ", cuda_graph_refusal());
  }
}

template <class State>
void end_capturing(State& state) {
  if constexpr (PlacedState<State>) state.capturing_ = false;
}

/// Later versions have a pool of pinned memory a capture as well.
template <class Allocator, class Id>
void end_host_pool(Allocator* allocator, const Id& id) {
  if constexpr (requires { allocator->end_allocate_to_pool(id); }) {
    allocator->end_allocate_to_pool(id);
  }
}

/// Whatever it throws is not worth more than what is being cleaned up after.
template <class F>
void quietly(F&& body) noexcept {
  try {
    body();
  } catch (...) {
  }
}

/// LibTorch's graph, with a way back out of a capture that failed: LibTorch itself
/// leaves the allocator and the generator in mid-capture then.
class Recording final : public at::cuda::CUDAGraph {
 public:
  Recording() { ++alive_; }
  ~Recording() { --alive_; }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  static bool any_alive() { return alive_ > 0; }

  void begin(c10::MempoolId_t pool) {
    began_ = true;
    // Other threads go on meanwhile: loaders pin memory, which in the global mode
    // would end the capture.
    capture_begin(pool, cudaStreamCaptureModeThreadLocal);
  }

  void abandon() noexcept {
    if (!began_ || capture_ended_) return;
    quietly([&] {
      // Says once more that it failed; the stream is an ordinary one afterwards.
      cudaGraph_t broken = nullptr;
      (void)cudaStreamEndCapture(capture_stream_, &broken);
      if (broken != nullptr) (void)cudaGraphDestroy(broken);
      (void)cudaGetLastError();
    });
    for (auto& [state, increment] : captured_generator_states_) {
      end_capturing(*state);
    }
    quietly([&] {
      // Throws where the pool was not in use yet; then there is nothing to let
      // go of.
      caching::endAllocateToPool(capture_dev_, mempool_id_);
      capture_ended_ = true;  // so that the destructor lets go of the pool
      end_host_pool(at::getHostAllocator(at::kCUDA), mempool_id_);
    });
  }

  /// Of the device's default generator.
  uint64_t& place() {
    TORCH_CHECK(captured_generator_states_.size() == 1,
                "[CudaGraph] expected one generator in a graph, got ",
                captured_generator_states_.size());
    return place_of(*captured_generator_states_.begin()->first);
  }

  bool is_on(c10::Device device) const {
    return device.is_cuda() && device.index() == capture_dev_;
  }

 private:
  static inline std::atomic<int> alive_ = 0;
  bool began_ = false;
};

// One capture at a time. Read by autograd's threads too, which run parts of it.
std::atomic<Recording*> g_underway{nullptr};

class Underway {
 public:
  explicit Underway(Recording& recording) {
    Recording* none = nullptr;
    TORCH_CHECK(g_underway.compare_exchange_strong(none, &recording),
                "[CudaGraph::capture] another capture is under way");
  }
  ~Underway() { g_underway = nullptr; }
  Underway(const Underway&) = delete;
  Underway& operator=(const Underway&) = delete;
};

Recording* recording_for(const at::Generator& generator) {
  Recording* recording = g_underway.load();
  // The first test is all that work outside of captures pays.
  if (recording == nullptr || !recording->is_on(generator.device())) {
    return nullptr;
  }
  const c10::cuda::CUDAGuard guard(generator.device());
  const auto status = c10::cuda::currentStreamCaptureStatusMayInitCtx();
  return status == c10::cuda::CaptureStatus::None ? nullptr : recording;
}

/// The device's stream for graphs.
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

std::string cuda_graph_refusal() {
  if constexpr (kPlaced) return {};
  return "LibTorch " + libtorch_version() +
         " keeps the place of random numbers in a graph to itself";
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
  quietly([&] { wait_for(impl_->own, impl_->before); });
  quietly([&] { c10::cuda::setCurrentCUDAStream(impl_->before); });
}

bool release_workspaces(c10::Device device) {
  if (!device.is_cuda()) return true;
  if (Recording::any_alive()) return false;
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
  std::unique_ptr<Recording> recording;  // null: nothing is captured
  int64_t bytes = 0;
};

CudaGraph::CudaGraph(int device, std::shared_ptr<CudaGraphPool> pool)
    : impl_(new Impl{static_cast<c10::DeviceIndex>(device), std::move(pool),
                     nullptr, 0}) {
  TORCH_CHECK(impl_->pool, "[CudaGraph] expected a pool, got none");
}

CudaGraph::~CudaGraph() {
  if (!impl_->recording) return;
  quietly([&] {
    const c10::cuda::CUDAGuard guard(impl_->device);
    c10::cuda::device_synchronize();
    impl_->recording.reset();
  });
}

void CudaGraph::capture(const std::function<void()>& body) {
  const std::string refusal = cuda_graph_refusal();
  TORCH_CHECK(refusal.empty(), "[CudaGraph::capture] ", refusal);
  TORCH_CHECK(!impl_->recording,
              "[CudaGraph::capture] expected a new graph, got one that was "
              "captured already");
  const c10::cuda::CUDAGuard guard(impl_->device);
  TORCH_CHECK(
      c10::cuda::getCurrentCUDAStream() != c10::cuda::getDefaultCUDAStream(),
      "[CudaGraph::capture] expected a stream that is not the default "
      "one; open a GraphStreamScope");
  caching::emptyCache();
  const int64_t before = cuda_memory(impl_->device).reserved;
  auto recording = std::make_unique<Recording>();
  try {
    const Underway underway(*recording);
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
              "[CudaGraph::replay] expected a capture before it");
  const c10::cuda::CUDAGuard guard(impl_->device);
  impl_->recording->replay();
}

int64_t CudaGraph::bytes() const {
  return impl_->bytes;
}

std::optional<uint64_t> captured_position(const at::Generator& generator) {
  Recording* recording = recording_for(generator);
  if (recording == nullptr) return std::nullopt;
  return recording->place();
}

void set_captured_position(const at::Generator& generator, uint64_t position) {
  Recording* recording = recording_for(generator);
  TORCH_CHECK(recording != nullptr,
              "[RngState] a state taken inside a capture was put back outside "
              "of it");
  recording->place() = position;
}

}  // namespace reprise::compat

#else

#include "compat/no_graphs.h"

namespace reprise::compat {

std::string cuda_graph_refusal() {
  return "graphs need LibTorch 2.11 or later, this is " + libtorch_version();
}

}  // namespace reprise::compat

#endif
