#include "models/segments.h"

#include <c10/util/Exception.h>

#include <limits>
#include <tuple>

namespace reprise::detail {

using torch::Tensor;

Tensor segment_positions(const Tensor& segments) {
  const torch::NoGradGuard no_grad;
  const int64_t length = segments.size(1);
  const Tensor index = torch::arange(length, segments.options());
  if (length < 2) return index.expand_as(segments);
  // Index of the first token of each segment, 0 elsewhere.
  Tensor starts = torch::zeros_like(segments);
  starts.narrow(1, 1, length - 1)
      .copy_(index.narrow(0, 1, length - 1) *
             segments.narrow(1, 1, length - 1)
                 .ne(segments.narrow(1, 0, length - 1)));
  return index - std::get<0>(starts.cummax(1));
}

Tensor segment_mask(const Tensor& segments, torch::ScalarType type) {
  const torch::NoGradGuard no_grad;
  const int64_t length = segments.size(1);
  const Tensor later =
      torch::ones({length, length}, segments.options().dtype(torch::kBool))
          .triu(1);
  const Tensor hidden =
      segments.unsqueeze(2).ne(segments.unsqueeze(1)).logical_or_(later);
  return torch::zeros({segments.size(0), 1, length, length},
                      segments.options().dtype(type))
      .masked_fill_(hidden.unsqueeze(1),
                    -std::numeric_limits<double>::infinity());
}

void check_language_batch(const std::string& name, const Tensors& batch) {
  TORCH_CHECK(!batch.empty() && batch.size() <= 3, "[model ", name,
              "] expected {tokens, targets} or {tokens, targets, segments}, "
              "got ",
              batch.size(), " tensors");
  if (!has_segments(batch)) return;
  const Tensor &tokens = batch[0], &segments = batch[2];
  TORCH_CHECK(segments.scalar_type() == torch::kLong &&
                  segments.sizes() == tokens.sizes(),
              "[model ", name,
              "] expected segments of type int64 and the shape of the tokens, ",
              tokens.sizes(), ", got ", segments.scalar_type(), " of shape ",
              segments.sizes());
}

}  // namespace reprise::detail
