#include "compat/attention.h"

#include <c10/util/Exception.h>
#include <torch/types.h>
#include <torch/version.h>

#include <cmath>
#include <limits>

namespace reprise::compat {
namespace {

#if TORCH_VERSION_MAJOR >= 2

torch::Tensor attend(const torch::Tensor& q, const torch::Tensor& k,
                     const torch::Tensor& v, const AttentionOptions& options) {
  if (!options.mask.defined()) {
    return at::scaled_dot_product_attention(q, k, v, {}, options.dropout,
                                            options.causal);
  }
  return at::scaled_dot_product_attention(q, k, v, options.mask,
                                          options.dropout);
}

#else

torch::Tensor attend(const torch::Tensor& q, const torch::Tensor& k,
                     const torch::Tensor& v, const AttentionOptions& options) {
  constexpr double kHidden = -std::numeric_limits<double>::infinity();
  const double scale = 1 / std::sqrt(static_cast<double>(q.size(-1)));
  // Scaling q rather than the scores saves a tensor of their size. The product
  // is not saved for the backward, so its mask can be put on in place.
  torch::Tensor scores = torch::matmul(q * scale, k.transpose(-2, -1));
  if (options.causal) {
    const auto bits = scores.options().dtype(torch::kBool);
    scores.masked_fill_(torch::ones({q.size(-2), k.size(-2)}, bits).triu(1),
                        kHidden);
  } else if (options.mask.defined()) {
    if (options.mask.scalar_type() == torch::kBool) {
      scores.masked_fill_(options.mask.logical_not(), kHidden);
    } else {
      scores = scores + options.mask;
    }
  }
  torch::Tensor weights = torch::softmax(scores, -1);
  scores.reset();
  if (options.dropout > 0) {
    weights = torch::dropout(weights, options.dropout, /*train=*/true);
  }
  return torch::matmul(weights, v);
}

#endif

}  // namespace

torch::Tensor attention(const torch::Tensor& q, const torch::Tensor& k,
                        const torch::Tensor& v,
                        const AttentionOptions& options) {
  TORCH_CHECK(!(options.causal && options.mask.defined()),
              "[attention] expected a mask or causal, got both; put the causal "
              "part into the mask");
  return attend(q, k, v, options);
}

}  // namespace reprise::compat
