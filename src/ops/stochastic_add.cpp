#include "ops/stochastic_add.h"

#include "ops/cuda/stochastic_add.h"
#include "ops/cuda/stochastic_round.h"
#include "ops/kernels.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <torch/types.h>

#include <algorithm>

namespace reprise::detail {
namespace {

using torch::Tensor;

constexpr int64_t kGroup = 4;  // elements that share a draw of random bits

void add_on_cpu(const Tensor& sums, const Tensor& values, uint64_t seed) {
  auto* const to = reinterpret_cast<uint16_t*>(sums.data_ptr());
  const float* const from = values.data_ptr<float>();
  const int64_t size = sums.numel();
  constexpr int64_t kGrain = 1 << 14;
  const int64_t groups = (size + kGroup - 1) / kGroup;
  at::parallel_for(0, groups, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      uint64_t random =
          kernels::random_bits(seed, static_cast<uint64_t>(group));
      const int64_t last = std::min(group * kGroup + kGroup, size);
      for (int64_t i = group * kGroup; i < last; ++i, random >>= 16) {
        const float sum = kernels::float_of(to[i]) + from[i];
        to[i] = kernels::round_stochastically(
            kernels::bits_of(sum), static_cast<uint32_t>(random & 0xffff));
      }
    }
  });
}

/// With LibTorch's operators and other random bits.
void add_on_device(Tensor sums, const Tensor& values, uint64_t seed) {
  const Tensor total = sums.to(torch::kFloat).add_(values);
  at::Generator generator =
      at::globalContext().defaultGenerator(sums.device()).clone();
  generator.set_current_seed(seed);
  const Tensor random =
      torch::randint(0, 1 << 16, sums.sizes(), generator,
                     torch::dtype(torch::kInt).device(sums.device()));
  const Tensor bits = total.view(torch::kInt);
  const Tensor rounded = bits.add(random).bitwise_and_(~0xffff);
  sums.copy_(
      torch::where(total.isfinite(), rounded.view(torch::kFloat), total));
}

}  // namespace

void add_stochastically(Tensor sums, const Tensor& values, uint64_t seed) {
  TORCH_CHECK(sums.scalar_type() == torch::kBFloat16 &&
                  values.scalar_type() == torch::kFloat &&
                  sums.sizes() == values.sizes() &&
                  sums.device() == values.device(),
              "[add_stochastically] expected bfloat16 and float32 of one shape "
              "on one device, got ",
              sums.scalar_type(), " of shape ", sums.sizes(), " and ",
              values.scalar_type(), " of shape ", values.sizes());
  TORCH_CHECK(
      sums.is_non_overlapping_and_dense() && sums.strides() == values.strides(),
      "[add_stochastically] expected dense tensors of one layout");
  if (sums.numel() == 0) return;
  if (sums.is_cpu()) return add_on_cpu(sums, values, seed);
  const bool aligned = is_aligned(sums, kGroup) && is_aligned(values, kGroup);
  if (!kernels_available(sums.device()) || !aligned) {
    return add_on_device(sums, values, seed);
  }
  kernels::StochasticAdd launch;
  launch.size = sums.numel();
  launch.sums = static_cast<uint16_t*>(sums.data_ptr());
  launch.values = values.data_ptr<float>();
  launch.seed = seed;
  kernels::stochastic_add(launch, kernel_stream(sums));
}

}  // namespace reprise::detail
