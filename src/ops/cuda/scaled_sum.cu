#include "scaled_sum.h"
#include "load_store.cuh"

#include <algorithm>
#include <type_traits>

namespace reprise::detail::kernels {
namespace {

inline __device__ void store1(float* to, int64_t i, float v) {
  to[i] = v;
}
template <class T>
__device__ void store1(T* to, int64_t i, float v) {
  to[i] = static_cast<T>(v);
}

/// `fours`: number of leading groups of four elements, which are aligned.
template <class T, class S>
__global__ void scaled_sum_kernel(int64_t count, int64_t fours, const float* factor,
                                  const T* values, S* sums, bool add) {
  const float f = *factor;
  const int64_t first = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = first; i < fours; i += step) {
    const float4 v = load4(values, i);
    float4 sum = add ? load4(sums, i) : make_float4(0, 0, 0, 0);
    sum.x = fmaf(f, v.x, sum.x);
    sum.y = fmaf(f, v.y, sum.y);
    sum.z = fmaf(f, v.z, sum.z);
    sum.w = fmaf(f, v.w, sum.w);
    store4(sums, i, sum);
  }
  for (int64_t i = 4 * fours + first; i < count; i += step) {
    store1(sums, i, fmaf(f, load1(values, i), add ? load1(sums, i) : 0));
  }
}

}  // namespace

void scaled_sum(const ScaledSum& args, void* stream) {
  if (args.count == 0) return;
  constexpr int kSumThreads = 256;
  constexpr int64_t kMaxBlocks = 132 * 16;
  const auto aligned = [](const void* p) {
    return reinterpret_cast<std::uintptr_t>(p) % 16 == 0;
  };
  const int64_t fours =
      aligned(args.values) && aligned(args.sums) ? args.count / 4 : 0;
  const int64_t work = std::max(fours, args.count - 4 * fours);
  const int64_t blocks = (work + kSumThreads - 1) / kSumThreads;
  with_type(args.values_type, [&](auto* from) {
    using T = std::remove_pointer_t<decltype(from)>;
    with_type(args.sums_type, [&](auto* to) {
      using S = std::remove_pointer_t<decltype(to)>;
      scaled_sum_kernel<T, S>
          <<<static_cast<unsigned>(std::min(blocks, kMaxBlocks)), kSumThreads, 0,
             static_cast<cudaStream_t>(stream)>>>(
              args.count, fours, args.factor, static_cast<const T*>(args.values),
              static_cast<S*>(args.sums), args.add);
    });
  });
  check_launch("scaled_sum");
}

}  // namespace reprise::detail::kernels
