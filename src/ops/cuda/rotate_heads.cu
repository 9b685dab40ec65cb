#include "load_store.cuh"
#include "rotate_heads.h"

#include <algorithm>
#include <type_traits>

namespace reprise::detail::kernels {
namespace {

constexpr int kHeads = 4;      // of a thread, whose loads are in flight at a time
constexpr int kThreads = 256;  // of a block, at most, unless one row needs more

/// Threads (x: pack of the first half of the channels, y: heads, z: position).
template <class T>
__global__ void __launch_bounds__(512) rotate_kernel(const RotateHeads args) {
  constexpr int kSize = Pack<T>::kSize;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.z + threadIdx.z;
  if (row >= args.samples * args.positions) return;
  const int64_t sample = row / args.positions;
  const int64_t position = row - sample * args.positions;
  const int half = static_cast<int>(args.dim / 2);
  const int channel = threadIdx.x * kSize;
  const int heads0 = static_cast<int>(args.parts[0].heads);
  const int heads1 = heads0 + static_cast<int>(args.parts[1].heads);
  const int heads = heads1 + static_cast<int>(args.parts[2].heads);
  float cos[kSize], sin[kSize];
  if (args.cos != nullptr) {
    const int64_t at = sample * args.table_stride + position * half + channel;
#pragma unroll
    for (int j = 0; j < kSize; j += 4) {
      reinterpret_cast<float4&>(cos[j]) = load4(args.cos + at + j, 0);
      reinterpret_cast<float4&>(sin[j]) = load4(args.sin + at + j, 0);
    }
    if (args.inverse) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) sin[j] = -sin[j];
    }
  }
  for (int base = threadIdx.y; base < heads; base += kHeads * blockDim.y) {
    uint4 first[kHeads], second[kHeads];  // halves of the channels
    T* to[kHeads];
    bool rotates[kHeads];
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
      const int head = base + k * blockDim.y;
      if (head >= heads) continue;
      const int which = (head >= heads0) + (head >= heads1);
      const HeadsPart& part = args.parts[which];
      const int own = head - (which == 0 ? 0 : which == 1 ? heads0 : heads1);
      const auto place = [&](const HeadsLayout& layout) {
        return sample * layout.sample + own * layout.head +
               position * layout.position + channel;
      };
      const T* from = static_cast<const T*>(part.from) + place(part.from_layout);
      to[k] = static_cast<T*>(part.to) + place(part.to_layout);
      rotates[k] = part.rotates;
      first[k] = *reinterpret_cast<const uint4*>(from);
      second[k] = *reinterpret_cast<const uint4*>(from + half);
    }
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
      if (base + k * blockDim.y >= heads) continue;
      if (rotates[k]) {
        Pack<T> a, b;
        a.unpack(first[k]);
        b.unpack(second[k]);
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          const float x = a.v[j], y = b.v[j];
          a.v[j] = x * cos[j] - y * sin[j];
          b.v[j] = y * cos[j] + x * sin[j];
        }
        a.store(to[k]);
        b.store(to[k] + half);
      } else {
        *reinterpret_cast<uint4*>(to[k]) = first[k];
        *reinterpret_cast<uint4*>(to[k] + half) = second[k];
      }
    }
  }
}

}  // namespace

void rotate_heads(const RotateHeads& args, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  with_type(args.type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    int64_t heads = 0;
    for (const HeadsPart& part : args.parts) heads += part.heads;
    const auto packs = static_cast<unsigned>(args.dim / 2 / Pack<T>::kSize);
    const auto groups = static_cast<unsigned>(
        std::clamp<int64_t>((heads + kHeads - 1) / kHeads, 1, 512 / packs));
    const unsigned rows = std::max(1u, std::min(kThreads / (packs * groups), 64u));
    const int64_t all = args.samples * args.positions;
    rotate_kernel<T>
        <<<static_cast<unsigned>((all + rows - 1) / rows),
           dim3(packs, groups, rows), 0, on>>>(args);
  });
  check_launch("rotate_heads");
}

}  // namespace reprise::detail::kernels
