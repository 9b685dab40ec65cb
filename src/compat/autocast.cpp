#include "compat/autocast.h"

#include <ATen/autocast_mode.h>
#include <torch/version.h>

// Since 2.4 there is one function with a device argument instead of one per device.
#define REPRISE_AUTOCAST_BY_DEVICE \
  (TORCH_VERSION_MAJOR > 2 ||      \
   (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 4))

namespace reprise::compat {

AutocastState AutocastState::current() {
  AutocastState state;
#if REPRISE_AUTOCAST_BY_DEVICE
  state.cpu_enabled = at::autocast::is_autocast_enabled(at::kCPU);
  state.cuda_enabled = at::autocast::is_autocast_enabled(at::kCUDA);
  state.cpu_dtype = at::autocast::get_autocast_dtype(at::kCPU);
  state.cuda_dtype = at::autocast::get_autocast_dtype(at::kCUDA);
#else
  state.cpu_enabled = at::autocast::is_cpu_enabled();
  state.cuda_enabled = at::autocast::is_enabled();
  state.cpu_dtype = at::autocast::get_autocast_cpu_dtype();
  state.cuda_dtype = at::autocast::get_autocast_gpu_dtype();
#endif
  state.cache_enabled = at::autocast::is_autocast_cache_enabled();
  return state;
}

void AutocastState::apply() const {
#if REPRISE_AUTOCAST_BY_DEVICE
  at::autocast::set_autocast_enabled(at::kCPU, cpu_enabled);
  at::autocast::set_autocast_enabled(at::kCUDA, cuda_enabled);
  at::autocast::set_autocast_dtype(at::kCPU, cpu_dtype);
  at::autocast::set_autocast_dtype(at::kCUDA, cuda_dtype);
#else
  at::autocast::set_cpu_enabled(cpu_enabled);
  at::autocast::set_enabled(cuda_enabled);
  at::autocast::set_autocast_cpu_dtype(cpu_dtype);
  at::autocast::set_autocast_gpu_dtype(cuda_dtype);
#endif
  at::autocast::set_autocast_cache_enabled(cache_enabled);
}

c10::ScalarType autocast_type(const at::Tensor& tensor) {
  const auto own = tensor.scalar_type();
  if (!tensor.is_floating_point() || own == at::kDouble) return own;
  const AutocastState state = AutocastState::current();
  if (tensor.is_cuda()) return state.cuda_enabled ? state.cuda_dtype : own;
  if (tensor.is_cpu()) return state.cpu_enabled ? state.cpu_dtype : own;
  return own;
}

AutocastGuard::AutocastGuard(const AutocastState& state)
    : before_(AutocastState::current()), changed_(!(state == before_)) {
  if (!changed_) return;
  at::autocast::increment_nesting();
  state.apply();
}

AutocastGuard::~AutocastGuard() {
  if (!changed_) return;
  before_.apply();
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
}

}  // namespace reprise::compat
