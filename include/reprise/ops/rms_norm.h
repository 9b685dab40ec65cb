#pragma once

#include <torch/types.h>

namespace reprise::ops {

/// Root-mean-square norm over the last dimension, as before each layer of a Llama:
/// x / √(mean(x²) + eps), times `weight`. x (…, D), weight (D).
///
/// Statistics are float32 if x is float16 or bfloat16, and have the type of x otherwise. The
/// normalized values are rounded to the type of x before the product, so that the result
/// has the type to which LibTorch promotes x and weight. Autocast has no effect.
///
/// Saves x and one value per row. LibTorch's operators also save the normalized values, and
/// a float32 copy of a half-precision x. Results equal the fallback's up to rounding, and
/// are reproducible bit for bit. No second derivative. Throws c10::Error if the shapes do not match or `eps` is negative.
torch::Tensor rms_norm(const torch::Tensor& x, const torch::Tensor& weight,
                       double eps);

namespace fallback {

/// The formula above in LibTorch's operators.
torch::Tensor rms_norm(const torch::Tensor& x, const torch::Tensor& weight,
                       double eps);

}  // namespace fallback
}  // namespace reprise::ops
