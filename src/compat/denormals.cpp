#include "compat/denormals.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include <atomic>
#include <bit>
#include <cstdint>
#include <dlfcn.h>
#include <limits>

namespace reprise::compat {
namespace {

constexpr int64_t kMaxValues = 1 << 18;  // examined per tensor

/// Examines the bits: while denormals are flushed, a comparison would treat
/// them as zero.
bool is_denormal(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return (bits & 0x7f800000U) == 0 && (bits & 0x007fffffU) != 0;
}

/// OpenBLAS may start its own threads when it is loaded, and has no interface
/// to run a function on them. Threads that it starts later inherit the mode of
/// the thread that calls it. The existing ones are therefore shut down, once
/// per process; the next matrix product starts new ones, which flush denormals.
void restart_blas_threads() {
  static std::atomic<bool> restarted{false};
  if (restarted.exchange(true)) return;
  using Shutdown = int (*)();
  using Config = const char* (*)();
  static const auto shutdown =
      reinterpret_cast<Shutdown>(dlsym(RTLD_DEFAULT, "blas_thread_shutdown_"));
  static const auto config =
      reinterpret_cast<Config>(dlsym(RTLD_DEFAULT, "openblas_get_config"));
  if (shutdown != nullptr && config != nullptr) shutdown();
}

/// Runs `work(&on)` once on each of LibTorch's OpenMP threads.
/// at::parallel_for() would run on this thread only, because this project is
/// compiled without OpenMP. The OpenMP library's entry point is looked up
/// instead, as in threads.cpp.
void run_on_openmp_threads(void (*work)(void*), bool on) {
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  static const auto parallel =
      reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  const auto threads = static_cast<unsigned>(at::get_num_threads());
  if (parallel != nullptr && threads > 1) parallel(work, &on, threads, 0);
}

void set_everywhere(bool on) {
  const auto set = [](void* on) {
    at::globalContext().setFlushDenormal(*static_cast<bool*>(on));
  };
  run_on_openmp_threads(set, on);
  at::globalContext().setFlushDenormal(on);
  if (on) restart_blas_threads();
}

}  // namespace

bool flushes_denormals() {
  volatile float smallest = std::numeric_limits<float>::min();
  volatile float half = smallest * 0.5F;
  return half == 0.0F;
}

FlushDenormals::FlushDenormals(c10::Device device) {
  if (!device.is_cpu() || flushes_denormals()) return;
  if (!at::globalContext().setFlushDenormal(true)) return;
  set_everywhere(true);
  active_ = true;
}

FlushDenormals::~FlushDenormals() {
  if (active_) set_everywhere(false);
}

double denormal_share(const std::vector<at::Tensor>& tensors) {
  int64_t denormal = 0;
  int64_t all = 0;
  for (const auto& tensor : tensors) {
    if (!tensor.defined() || !tensor.device().is_cpu() ||
        tensor.scalar_type() != at::kFloat || !tensor.is_contiguous()) {
      continue;
    }
    const auto* values = tensor.data_ptr<float>();
    // Large tensors are sampled. An odd stride covers all columns.
    const int64_t stride = tensor.numel() / kMaxValues * 2 + 1;
    for (int64_t i = 0; i < tensor.numel(); i += stride, ++all) {
      denormal += is_denormal(values[i]);
    }
  }
  return all > 0 ? static_cast<double>(denormal) / static_cast<double>(all) : 0;
}

}  // namespace reprise::compat
