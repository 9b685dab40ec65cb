#include "ops/rotate_heads.h"

#include "ops/kernels.h"

namespace reprise::detail {

using kernels::HeadsLayout;
using kernels::HeadsPart;
using kernels::RotateHeads;
using torch::Tensor;

namespace {

/// Elements of one memory access of the kernel.
int64_t width_of(const Tensor& x) {
  return 16 / static_cast<int64_t>(x.element_size());
}

HeadsLayout heads_layout(const Tensor& x) {
  return {x.stride(0), x.stride(1), x.stride(2)};
}

bool is_kernel_table(const Tensor& table, const Tensor& x) {
  const int64_t positions = x.size(2), half = x.size(3) / 2;
  const bool shared = table.sizes() == torch::IntArrayRef({positions, half});
  const bool per_sample =
      table.sizes() == torch::IntArrayRef({x.size(0), 1, positions, half});
  return (shared || per_sample) && is_float32(table) &&
         table.device() == x.device() && table.is_contiguous() &&
         is_aligned(table, 4);
}

}  // namespace

bool has_kernel_layout(const Tensor& x) {
  const int64_t width = width_of(x);
  return x.stride(3) == 1 && x.stride(0) % width == 0 &&
         x.stride(1) % width == 0 && x.stride(2) % width == 0 &&
         is_aligned(x, width);
}

bool prepare_rotation(const Tensor& x, const Tensor& cos, const Tensor& sin,
                      RotateHeads& launch) {
  if (!kernels_available(x.device()) || x.numel() == 0 ||
      !(is_float32(x) || is_half(x)) || x.size(3) % (2 * width_of(x)) != 0 ||
      x.size(3) > RotateHeads::kMaxDim) {
    return false;
  }
  launch.samples = x.size(0);
  launch.positions = x.size(2);
  launch.dim = x.size(3);
  launch.type = kernel_dtype(x);
  if (!cos.defined()) return true;
  if (!is_kernel_table(cos, x) || !is_kernel_table(sin, x)) return false;
  launch.cos = float_data(cos);
  launch.sin = float_data(sin);
  launch.table_stride = cos.dim() == 2 ? 0 : cos.stride(0);
  return true;
}

HeadsPart heads_part(const Tensor& from, const Tensor& to, bool rotates) {
  HeadsPart part;
  part.heads = from.size(1);
  part.rotates = rotates;
  part.from = from.data_ptr();
  part.from_layout = heads_layout(from);
  part.to = to.data_ptr();
  part.to_layout = heads_layout(to);
  return part;
}

Tensor run_rotate(const Tensor& x, const Tensor& cos, const Tensor& sin,
                  bool inverse) {
  if (x.dim() != 4) return {};
  RotateHeads launch;
  if (!prepare_rotation(x, cos, sin, launch) || !has_kernel_layout(x)) {
    return {};
  }
  const Tensor result = torch::empty_like(x);
  if (!has_kernel_layout(result)) return {};
  launch.parts[0] = heads_part(x, result, true);
  launch.inverse = inverse;
  kernels::rotate_heads(launch, kernel_stream(x));
  return result;
}

}  // namespace reprise::detail
