#include "ops/products.h"

#include "compat/cuda.h"
#include "compat/gemm.h"
#include "ops/cuda/split_product.h"
#include "ops/tf32x3_gemm.h"

#include <torch/types.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>

namespace reprise {
namespace {

std::atomic<bool> split_allowed{true};

}  // namespace

void allow_split_products(bool allowed) {
  split_allowed = allowed;
}

bool takes_split_products(const torch::Device& device) {
  return split_allowed && device.is_cuda() &&
         kernels::split_product_runs(device.has_index() ? device.index() : 0);
}

namespace lean {
namespace {

using torch::Tensor;

/// How a matrix lies, if its values are next to each other in one direction.
struct Lines {
  bool along_rows;  // a row's values are next to each other
  int64_t stride;
};

std::optional<Lines> lines_of(const Tensor& matrix) {
  if (matrix.stride(1) == 1) return Lines{true, matrix.stride(0)};
  if (matrix.stride(0) == 1) return Lines{false, matrix.stride(1)};
  return std::nullopt;
}

/// Whether the kernel can add to `sum`.
bool can_hold(const Tensor& sum) {
  return sum.stride(1) == 1 && sum.stride(0) % 4 == 0 &&
         reinterpret_cast<uintptr_t>(sum.data_ptr()) % 16 == 0;
}

/// a b for the kernel, but for where to; nothing where it cannot, or is no faster.
std::optional<kernels::SplitProduct> split(const Tensor& a, const Tensor& b) {
  constexpr int64_t kFewest = 64;                  // rows and columns
  constexpr int64_t kSmallest = int64_t{1} << 26;  // multiplications
  kernels::SplitProduct made;
  made.m = a.size(0);
  made.n = made.ldc = b.size(1);
  made.k = a.size(1);
  if (a.scalar_type() != torch::kFloat || b.scalar_type() != torch::kFloat ||
      std::min({made.m, made.n, made.k}) < kFewest ||
      made.m * made.n * made.k < kSmallest ||
      !takes_split_products(a.device())) {
    return std::nullopt;
  }
  const auto of_a = lines_of(a), of_b = lines_of(b);
  if (!of_a || !of_b) return std::nullopt;
  made.a = a.data_ptr<float>();
  made.b = b.data_ptr<float>();
  made.a_along = of_a->along_rows;
  made.b_along = !of_b->along_rows;
  made.lda = of_a->stride;
  made.ldb = of_b->stride;
  if (!made.fits()) return std::nullopt;
  return made;
}

/// `c`, which is of single precision, becomes it.
void run(kernels::SplitProduct product, const Tensor& c) {
  product.c = c.data_ptr<float>();
  product.ldc = c.stride(0);
  const int device = c.device().index();
  kernels::split_product(product, device, compat::current_cuda_stream(device));
}

/// In single precision a product that also adds a bias is not cut along its inner
/// dimension by the library, which leaves a GPU idle where that is by far the longest.
Tensor library_product(const Tensor& a, const Tensor& b, const Tensor& bias) {
  if (!bias.defined()) return torch::mm(a, b);
  const bool cut = a.is_cuda() && a.scalar_type() == torch::kFloat &&
                   b.size(0) > 2 * b.size(1);
  return cut ? torch::mm(a, b).add_(bias) : torch::addmm(bias, a, b);
}

}  // namespace

Tensor product(const Tensor& a, const Tensor& b, const Tensor& bias) {
  auto made = split(a, b);
  if (!made || (bias.defined() && !bias.is_contiguous())) {
    return library_product(a, b, bias);
  }
  if (bias.defined()) made->bias = bias.data_ptr<float>();
  const Tensor c = torch::empty({a.size(0), b.size(1)}, a.options());
  run(*made, c);
  return c;
}

Tensor product_as(const Tensor& a, const Tensor& b, torch::ScalarType type) {
  const bool single = type == torch::kFloat && a.scalar_type() == type;
  return single ? product(a, b) : compat::product_as(a, b, type);
}

void add_product(Tensor& sum, const Tensor& a, const Tensor& b) {
  auto made = split(a, b);
  if (!made || sum.scalar_type() != torch::kFloat || !can_hold(sum)) {
    compat::add_product(sum, a, b);
    return;
  }
  made->add = true;
  run(*made, sum);
}

}  // namespace lean
}  // namespace reprise
