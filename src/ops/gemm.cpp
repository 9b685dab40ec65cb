#include "ops/gemm.h"

#include "compat/gemm.h"
#include "compat/lt_gemm.h"
#include "ops/cuda/tf32x3_gemm.h"
#include "ops/kernels.h"
#include "ops/tf32x3_gemm.h"

#include <torch/types.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>

namespace reprise::detail {
namespace {

using kernels::Tf32x3Gemm;
using torch::Tensor;

std::atomic<bool> g_tf32x3_allowed{true};

/// Memory layout of a matrix that is contiguous along one dimension.
struct MatrixLayout {
  bool row_major;
  int64_t leading_dimension;
};

std::optional<MatrixLayout> layout_of(const Tensor& matrix) {
  if (matrix.stride(1) == 1) return MatrixLayout{true, matrix.stride(0)};
  if (matrix.stride(0) == 1) return MatrixLayout{false, matrix.stride(1)};
  return std::nullopt;
}

/// Whether the kernel can add to `sum`.
bool can_accumulate(const Tensor& sum) {
  return sum.stride(1) == 1 && sum.stride(0) % 4 == 0 &&
         reinterpret_cast<uintptr_t>(sum.data_ptr()) % 16 == 0;
}

/// Arguments of the kernel for a b, without the output; nothing if the kernel does not
/// support the product or is not faster.
std::optional<Tf32x3Gemm> make_tf32x3(const Tensor& a, const Tensor& b) {
  constexpr int64_t kMinSize = 64;  // rows, columns and depth
  constexpr int64_t kMinMultiplications = int64_t{1} << 26;
  Tf32x3Gemm gemm;
  gemm.m = a.size(0);
  gemm.n = gemm.ldc = b.size(1);
  gemm.k = a.size(1);
  if (!is_float32(a) || !is_float32(b) ||
      std::min({gemm.m, gemm.n, gemm.k}) < kMinSize ||
      gemm.m * gemm.n * gemm.k < kMinMultiplications ||
      !uses_tf32x3_gemm(a.device())) {
    return std::nullopt;
  }
  const auto a_layout = layout_of(a), b_layout = layout_of(b);
  if (!a_layout || !b_layout) return std::nullopt;
  gemm.a = a.data_ptr<float>();
  gemm.b = b.data_ptr<float>();
  gemm.a_k_contiguous = a_layout->row_major;
  gemm.b_k_contiguous = !b_layout->row_major;
  gemm.lda = a_layout->leading_dimension;
  gemm.ldb = b_layout->leading_dimension;
  if (!gemm.supported()) return std::nullopt;
  return gemm;
}

/// Writes the product to `c`, a float32 tensor.
void run_tf32x3(Tf32x3Gemm gemm, const Tensor& c) {
  gemm.c = c.data_ptr<float>();
  gemm.ldc = c.stride(0);
  gemm.device = c.device().index();
  kernels::tf32x3_gemm(gemm, kernel_stream(c));
}

/// If a float32 product also adds a bias, the library does not divide it along its inner
/// dimension, which leaves a GPU idle if that is by far the longest.
Tensor library_gemm(const Tensor& a, const Tensor& b, const Tensor& bias) {
  if (a.is_cuda() && a.element_size() == 2) {
    Tensor c = torch::empty({a.size(0), b.size(1)}, a.options());
    if (compat::lt_gemm(
            {.a = a, .b = b, .out = c, .bias = bias, .addend = {}})) {
      return c;
    }
  }
  if (!bias.defined()) return torch::mm(a, b);
  const bool separate = a.is_cuda() && a.scalar_type() == torch::kFloat &&
                        b.size(0) > 2 * b.size(1);
  return separate ? torch::mm(a, b).add_(bias) : torch::addmm(bias, a, b);
}

}  // namespace

void allow_tf32x3_gemm(bool allowed) {
  g_tf32x3_allowed = allowed;
}

bool uses_tf32x3_gemm(const torch::Device& device) {
  return g_tf32x3_allowed &&
         kernels_available(device, kernels::kTf32x3ComputeCapability);
}

Tensor gemm(const Tensor& a, const Tensor& b, const Tensor& bias) {
  auto tf32x3 = make_tf32x3(a, b);
  if (!tf32x3 || (bias.defined() && !bias.is_contiguous())) {
    return library_gemm(a, b, bias);
  }
  if (bias.defined()) tf32x3->bias = bias.data_ptr<float>();
  const Tensor c = torch::empty({a.size(0), b.size(1)}, a.options());
  run_tf32x3(*tf32x3, c);
  return c;
}

Tensor gemm_plus(const Tensor& residual, const Tensor& a, const Tensor& b,
                 const Tensor& bias, const Tensor& rounded_bias) {
  if (a.is_cuda() && a.element_size() == 2) {
    Tensor c = torch::empty({a.size(0), b.size(1)}, residual.options());
    const Tensor added =
        bias.defined() ? bias.detach().to(c.scalar_type()) : bias;
    if (compat::lt_gemm(
            {.a = a, .b = b, .out = c, .bias = added, .addend = residual})) {
      return c;
    }
  }
  return residual + gemm(a, b, rounded_bias);
}

Tensor unused_product(const Tensor& a, const Tensor& b,
                      const Tensor& residual) {
  const auto type =
      residual.numel() > 0
          ? c10::promoteTypes(a.scalar_type(), residual.scalar_type())
          : a.scalar_type();
  return torch::empty({a.size(0), b.size(1)}, a.options().dtype(type));
}

Tensor gemm_as(const Tensor& a, const Tensor& b, torch::ScalarType type) {
  const bool single = type == torch::kFloat && a.scalar_type() == type;
  return single ? gemm(a, b) : compat::gemm_as(a, b, type);
}

void gemm_add(Tensor& sum, const Tensor& a, const Tensor& b) {
  auto tf32x3 = make_tf32x3(a, b);
  if (!tf32x3 || !is_float32(sum) || !can_accumulate(sum)) {
    compat::gemm_add(sum, a, b);
    return;
  }
  tf32x3->add = true;
  run_tf32x3(*tf32x3, sum);
}

}  // namespace reprise::detail
