#pragma once

namespace reprise::detail::kernels {

/// Element type of a tensor that a kernel reads or writes. kNone: no tensor.
/// Tested by tests/ops/kernels_test.cpp.
enum class DType { kNone, kFloat32, kBFloat16, kFloat16 };

}  // namespace reprise::detail::kernels
