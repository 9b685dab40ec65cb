#include "image_conv.h"
#include "load_store.cuh"

#include <type_traits>

namespace reprise::detail::kernels {
namespace {

constexpr int kThreads = ImageConvShape::kThreads;
constexpr int kPixels = ImageConvShape::kPixels;
constexpr int kFilters = ImageConvShape::kFilters;
constexpr int kMaxChannels = ImageConvShape::kMaxChannels;

/// ImageConvShape in 32-bit integers. Outputs are processed in quads, four adjacent ones of
/// a row, which are numbered through all rows of all samples.
struct Sizes {
  int channels, height, width, filters, padding;
  int out_height, out_width;
  int quads_of_row, quads;
  bool aligned;  // rows of outputs begin at multiples of 16 bytes
};

struct Quad {
  int sample, row, column;

  __device__ Quad(const Sizes& sizes, int index) {
    const unsigned line =
        static_cast<unsigned>(index) / static_cast<unsigned>(sizes.quads_of_row);
    column = kPixels * (index - static_cast<int>(line) * sizes.quads_of_row);
    sample = static_cast<int>(line / static_cast<unsigned>(sizes.out_height));
    row = static_cast<int>(line) - sample * sizes.out_height;
  }
  /// Offset of the first output of the quad.
  __device__ int64_t place(const Sizes& sizes, int filter) const {
    const int64_t line =
        (static_cast<int64_t>(sample) * sizes.filters + filter) * sizes.out_height +
        row;
    return line * sizes.out_width + column;
  }
};

/// The pixels of one channel that a quad depends on; zero outside of the image.
template <int kSide, int kStride>
struct Window {
  static constexpr int kSpan = (kPixels - 1) * kStride + kSide;
  float values[kSide][kSpan];

  __device__ Window(const Sizes& sizes, const Quad& quad, const float* x,
                    int channel) {
    const int top = quad.row * kStride - sizes.padding;
    const int left = quad.column * kStride - sizes.padding;
    const float* image =
        x + (static_cast<int64_t>(quad.sample) * sizes.channels + channel) *
                sizes.height * sizes.width;
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      const bool inside = static_cast<unsigned>(top + i) <
                          static_cast<unsigned>(sizes.height);
      const float* row = image + static_cast<int64_t>(top + i) * sizes.width + left;
#pragma unroll
      for (int j = 0; j < kSpan; ++j) {
        values[i][j] = inside && static_cast<unsigned>(left + j) <
                                     static_cast<unsigned>(sizes.width)
                           ? row[j]
                           : 0.0f;
      }
    }
  }
  /// The pixel that filter weight (i, j) is multiplied by for output `pixel` of the quad.
  __device__ float at(int i, int j, int pixel) const {
    return values[i][pixel * kStride + j];
  }
};

/// The four values of a quad, zero past the end of the row; `left` are left of it.
__device__ float4 load_quad(const float* from, int left, bool aligned) {
  if (aligned) return load4(from, 0);
  return make_float4(from[0], left > 1 ? from[1] : 0, left > 2 ? from[2] : 0,
                     left > 3 ? from[3] : 0);
}
__device__ void store_quad(float* to, int left, bool aligned,
                           const float (&v)[kPixels]) {
  if (aligned) return store4(to, 0, make_float4(v[0], v[1], v[2], v[3]));
#pragma unroll
  for (int p = 0; p < kPixels; ++p) {
    if (p < left) to[p] = v[p];
  }
}

/// One block per 128 quads and eight filters.
template <int kSide, int kStride>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(Sizes sizes, const float* x, const float* weight,
                   const float* bias, float* y) {
  constexpr int kTaps = kSide * kSide;
  // Filters last: all threads read the weights of all filters at the same time.
  __shared__ __align__(16) float shared[kMaxChannels][kTaps][kFilters];
  const int first = blockIdx.y * kFilters;
  for (int i = threadIdx.x; i < sizes.channels * kTaps * kFilters; i += kThreads) {
    const int filter = first + i % kFilters, tap = i / kFilters;
    shared[tap / kTaps][tap % kTaps][i % kFilters] =
        filter < sizes.filters ? weight[filter * sizes.channels * kTaps + tap] : 0;
  }
  __syncthreads();
  const int index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= sizes.quads) return;
  const Quad quad(sizes, index);
  float sums[kFilters][kPixels];
#pragma unroll
  for (int f = 0; f < kFilters; ++f) {
    const float begin =
        bias != nullptr && first + f < sizes.filters ? bias[first + f] : 0;
#pragma unroll
    for (int p = 0; p < kPixels; ++p) sums[f][p] = begin;
  }
  for (int c = 0; c < sizes.channels; ++c) {
    const Window<kSide, kStride> window(sizes, quad, x, c);
#pragma unroll
    for (int t = 0; t < kTaps; ++t) {
#pragma unroll
      for (int f = 0; f < kFilters; ++f) {
        const float w = shared[c][t][f];
#pragma unroll
        for (int p = 0; p < kPixels; ++p) {
          sums[f][p] += w * window.at(t / kSide, t % kSide, p);
        }
      }
    }
  }
#pragma unroll
  for (int f = 0; f < kFilters; ++f) {
    if (first + f < sizes.filters) {
      store_quad(y + quad.place(sizes, first + f), sizes.out_width - quad.column,
                 sizes.aligned, sums[f]);
    }
  }
}

/// One block per part, eight filters and one channel: sums over the quads of the part of
/// pixel times output gradient, for each weight, and of the output gradient, for the bias.
template <int kSide, int kStride>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(Sizes sizes, int each, const float* x, const float* dy,
                    float* scratch) {
  constexpr int kTaps = kSide * kSide, kSums = kFilters * (kTaps + 1);
  const int first = blockIdx.y * kFilters, channel = blockIdx.z;
  float sums[kFilters][kTaps + 1] = {};
  const int begin = blockIdx.x * each;
  const int end = begin + each < sizes.quads ? begin + each : sizes.quads;
  for (int index = begin + threadIdx.x; index < end; index += kThreads) {
    const Quad quad(sizes, index);
    float4 gradients[kFilters];
#pragma unroll
    for (int f = 0; f < kFilters; ++f) {
      gradients[f] = first + f < sizes.filters
                         ? load_quad(dy + quad.place(sizes, first + f),
                                     sizes.out_width - quad.column, sizes.aligned)
                         : make_float4(0, 0, 0, 0);
    }
    const Window<kSide, kStride> window(sizes, quad, x, channel);
#pragma unroll
    for (int f = 0; f < kFilters; ++f) {
      const float4 g = gradients[f];
#pragma unroll
      for (int t = 0; t < kTaps; ++t) {
        const int i = t / kSide, j = t % kSide;
        sums[f][t] += g.x * window.at(i, j, 0) + g.y * window.at(i, j, 1) +
                      g.z * window.at(i, j, 2) + g.w * window.at(i, j, 3);
      }
      sums[f][kTaps] += g.x + g.y + g.z + g.w;
    }
  }
  __shared__ float shared[kThreads / 32][kSums];
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    float sum = sums[i / (kTaps + 1)][i % (kTaps + 1)];
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) {
      sum += __shfl_xor_sync(~0u, sum, apart);
    }
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32][i] = sum;
  }
  __syncthreads();
  const int64_t block = (static_cast<int64_t>(blockIdx.x) * gridDim.z + channel) *
                            gridDim.y +
                        blockIdx.y;
  for (int i = threadIdx.x; i < kSums; i += kThreads) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) sum += shared[w][i];
    scratch[block * kSums + i] = sum;
  }
}

/// One block per 32 sums: adds up their parts.
__global__ void merge_kernel(int parts, int channels, int filters, int taps,
                             const float* scratch, float* dweight, float* dbias) {
  constexpr int kWays = 8;
  const int groups = (filters + kFilters - 1) / kFilters;
  const int sums = kFilters * (taps + 1), all = channels * groups * sums;
  const int mine = blockIdx.x * 32 + threadIdx.x;
  const float total = sum_of_parts<kWays>(parts, all, scratch + mine, mine < all);
  if (threadIdx.y != 0 || mine >= all) return;
  const int tap = mine % (taps + 1);
  const int filter = mine / sums % groups * kFilters + mine % sums / (taps + 1);
  const int channel = mine / (sums * groups);
  if (filter >= filters) return;
  if (tap < taps) {
    dweight[(filter * channels + channel) * taps + tap] = total;
  } else if (channel == 0 && dbias != nullptr) {
    dbias[filter] = total;
  }
}

/// `outputs`: the outputs, or their gradients.
Sizes sizes_of(const ImageConvShape& shape, const float* outputs) {
  Sizes sizes;
  sizes.channels = static_cast<int>(shape.channels);
  sizes.height = static_cast<int>(shape.height);
  sizes.width = static_cast<int>(shape.width);
  sizes.filters = static_cast<int>(shape.filters);
  sizes.padding = static_cast<int>(shape.padding);
  sizes.out_height = static_cast<int>(shape.out_height());
  sizes.out_width = static_cast<int>(shape.out_width());
  sizes.quads_of_row = (sizes.out_width + kPixels - 1) / kPixels;
  sizes.quads = static_cast<int>(shape.quads());
  sizes.aligned = sizes.out_width % kPixels == 0 &&
                  reinterpret_cast<uintptr_t>(outputs) % sizeof(float4) == 0;
  return sizes;
}

/// Calls `use` with the kernel size and the stride as types.
template <class F>
void with_filter(const ImageConvShape& shape, F&& use) {
  const auto with_stride = [&](auto side) {
    if (shape.stride == 1) return use(side, std::integral_constant<int, 1>());
    use(side, std::integral_constant<int, 2>());
  };
  if (shape.kernel_size == 2) return with_stride(std::integral_constant<int, 2>());
  with_stride(std::integral_constant<int, 3>());
}

}  // namespace

void image_conv_forward(const ImageConvForward& args, void* stream) {
  const ImageConvShape& shape = args.shape;
  const auto on = static_cast<cudaStream_t>(stream);
  const Sizes sizes = sizes_of(shape, args.y);
  const dim3 blocks((sizes.quads + kThreads - 1) / kThreads,
                    shape.filter_groups());
  with_filter(shape, [&](auto side, auto step) {
    forward_kernel<decltype(side)::value, decltype(step)::value>
        <<<blocks, kThreads, 0, on>>>(sizes, args.x, args.weight, args.bias,
                                      args.y);
  });
  check_launch("image_conv_forward");
}

void image_conv_backward(const ImageConvBackward& args, void* stream) {
  const ImageConvShape& shape = args.shape;
  const auto on = static_cast<cudaStream_t>(stream);
  const Sizes sizes = sizes_of(shape, args.dy);
  const auto parts = static_cast<int>(shape.parts());
  const dim3 blocks(parts, shape.filter_groups(), sizes.channels);
  with_filter(shape, [&](auto side, auto step) {
    backward_kernel<decltype(side)::value, decltype(step)::value>
        <<<blocks, kThreads, 0, on>>>(sizes, (sizes.quads + parts - 1) / parts,
                                      args.x, args.dy, args.scratch);
  });
  const int64_t sums = shape.scratch_size() / parts;
  merge_kernel<<<(sums + 31) / 32, dim3(32, 8), 0, on>>>(
      parts, sizes.channels, sizes.filters,
      static_cast<int>(shape.kernel_size * shape.kernel_size), args.scratch,
      args.dweight, args.dbias);
  check_launch("image_conv_backward");
}

}  // namespace reprise::detail::kernels
