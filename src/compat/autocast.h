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

/// The type to which this thread's autocast settings convert an operand `tensor` of a matrix
/// product; its own type if they do not convert it.
c10::ScalarType autocast_type(const at::Tensor& tensor);

/// Applies `state` to this thread for the lifetime of the guard, then restores the previous
/// settings. The outermost guard clears autocast's cache of converted weights at its end.
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
