#pragma once

#include <torch/types.h>

namespace reprise::ops {

/// torch::silu(gate) * up, the activation of a gated feed-forward layer. gate and up have
/// the same shape and type; they may be views of the result of one matrix product.
///
/// Saves gate and up; the backward recomputes silu(gate), which the fallback saves as well.
/// Values and gradients equal the fallback's bit for bit. No second derivative. Throws
/// c10::Error if shapes or types differ.
torch::Tensor swiglu(const torch::Tensor& gate, const torch::Tensor& up);

namespace fallback {

/// torch::silu(gate) * up. Saves gate, silu(gate) and up.
torch::Tensor swiglu(const torch::Tensor& gate, const torch::Tensor& up);

}  // namespace fallback
}  // namespace reprise::ops
