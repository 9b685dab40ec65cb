#include "compat/gemm.h"

#include "compat/lt_gemm.h"

#include <ATen/ATen.h>
#include <torch/version.h>

// Matrix products of half precision with a float32 result exist since 2.8.
#define REPRISE_HAS_MIXED_GEMM \
  (TORCH_VERSION_MAJOR > 2 ||  \
   (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 8))

namespace reprise::compat {
namespace {

/// Whether a product of `a` can have `type` without intermediate rounding.
[[maybe_unused]] bool widens(const at::Tensor& a, at::ScalarType type) {
  return a.is_cuda() && a.element_size() == 2 && type == at::kFloat;
}

}  // namespace

void gemm_add(at::Tensor& sum, const at::Tensor& a, const at::Tensor& b) {
  if (lt_gemm({.a = a, .b = b, .out = sum, .bias = {}, .addend = sum})) return;
  if (sum.scalar_type() == a.scalar_type()) {
    sum.addmm_(a, b);
    return;
  }
#if REPRISE_HAS_MIXED_GEMM
  if (widens(a, sum.scalar_type())) {
    at::addmm_out(sum, sum, a, b, sum.scalar_type());
    return;
  }
#endif
  sum.add_(at::mm(a, b));
}

void gemm_into(at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  if (lt_gemm({.a = a, .b = b, .out = out, .bias = {}, .addend = {}})) return;
  if (out.scalar_type() == a.scalar_type()) {
    at::mm_out(out, a, b);
    return;
  }
#if REPRISE_HAS_MIXED_GEMM
  if (widens(a, out.scalar_type())) {
    at::mm_out(out, a, b, out.scalar_type());
    return;
  }
#endif
  out.copy_(at::mm(a, b));
}

bool gemm_widens([[maybe_unused]] const at::Device& device) {
#if REPRISE_HAS_MIXED_GEMM
  return device.is_cuda();
#else
  return false;
#endif
}

at::Tensor gemm_as(const at::Tensor& a, const at::Tensor& b,
                   at::ScalarType type) {
  if (!a.is_cuda()) return at::mm(a, b).to(type);
  at::Tensor out = at::empty({a.size(0), b.size(1)}, a.options().dtype(type));
  gemm_into(out, a, b);
  return out;
}

}  // namespace reprise::compat
