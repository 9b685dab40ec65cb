#include "compat/attention.h"

#include <reprise/ops/attention.h>

#include <c10/util/Exception.h>
#include <torch/types.h>

#include <cmath>
#include <limits>

namespace reprise::ops {
namespace {

using torch::Tensor;

void check_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                     const AttentionOptions& options) {
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && k.sizes() == v.sizes() &&
                  k.size(1) > 0 && q.size(1) % k.size(1) == 0,
              "[attention] expected q (N, H, T, D) and k, v (N, G, S, D), with "
              "H a multiple of G, got ",
              q.sizes(), ", ", k.sizes(), " and ", v.sizes());
  TORCH_CHECK(!(options.causal && options.mask.defined()),
              "[attention] expected a mask or causal, got both; include the "
              "causal part in the mask");
}

/// a (N, H, T, X) times b (N, G, X, Y), whose heads each serve H / G heads of a. The rows
/// of these heads are one matrix, so that b is not repeated.
Tensor grouped_matmul(const Tensor& a, const Tensor& b) {
  if (a.size(1) == b.size(1)) return torch::matmul(a, b);
  const int64_t rows = a.size(1) / b.size(1) * a.size(2);
  const Tensor grouped = a.reshape({a.size(0), b.size(1), rows, a.size(3)});
  // Not a view to autograd, so that the mask can be applied in place.
  return torch::_unsafe_view(torch::matmul(grouped, b),
                             {a.size(0), a.size(1), a.size(2), b.size(3)});
}

}  // namespace

Tensor fallback::attention(const Tensor& q, const Tensor& k, const Tensor& v,
                           const AttentionOptions& options) {
  check_attention(q, k, v, options);
  constexpr double kMasked = -std::numeric_limits<double>::infinity();
  const double scale = 1 / std::sqrt(static_cast<double>(q.size(-1)));
  // Scaling q instead of the scores avoids a tensor of their size. The matrix product does
  // not save its result, so the mask can be applied in place.
  Tensor scores = grouped_matmul(q * scale, k.transpose(-2, -1));
  if (options.causal) {
    const auto bits = scores.options().dtype(torch::kBool);
    scores.masked_fill_(torch::ones({q.size(-2), k.size(-2)}, bits).triu(1),
                        kMasked);
  } else if (options.mask.defined()) {
    if (options.mask.scalar_type() == torch::kBool) {
      scores.masked_fill_(options.mask.logical_not(), kMasked);
    } else if (options.mask.scalar_type() == scores.scalar_type()) {
      scores.add_(options.mask);
    } else {
      scores = scores + options.mask;
    }
  }
  Tensor weights = torch::softmax(scores, -1);
  scores.reset();
  if (options.dropout > 0) {
    weights = torch::dropout(weights, options.dropout, /*train=*/true);
  }
  return grouped_matmul(weights, v);
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v,
                 const AttentionOptions& options) {
  check_attention(q, k, v, options);
  if (!compat::has_fused_attention()) {
    return fallback::attention(q, k, v, options);
  }
  return compat::fused_attention(q, k, v, options.mask, options.dropout,
                                 options.causal);
}

}  // namespace reprise::ops
