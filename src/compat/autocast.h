#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace reprise::compat {

/// This thread's autocast settings for CPU and CUDA.
struct AutocastState {
  bool cpu_enabled = false;
  bool cuda_enabled = false;
  bool cache_enabled = true;
  c10::ScalarType cpu_dtype = c10::ScalarType::BFloat16;
  c10::ScalarType cuda_dtype = c10::ScalarType::Half;

  static AutocastState current();
  void apply() const;
  bool operator==(const AutocastState&) const = default;
};

/// The type that a matrix product has its operand `tensor` in under this thread's
/// autocast settings; the tensor's own where autocast leaves it alone.
c10::ScalarType autocast_type(const at::Tensor& tensor);

/// Runs a scope under `state` and puts back what was there before. An outermost
/// scope drops its cache of cast weights when it ends.
class AutocastGuard {
 public:
  explicit AutocastGuard(const AutocastState& state);
  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  AutocastState before_;
  bool changed_;
};

}  // namespace reprise::compat
