#include "compat/cuda.h"
#include "support.h"

#include <reprise/memory/meter.h>

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/linear.h>

namespace {

/// cuBLAS allocates a workspace per thread at its first use and never frees it.
/// Allocates it before any test, so that tests can compare live bytes.
void warm_up(torch::Device device) {
  for (const auto type : {torch::kFloat, torch::kDouble}) {
    const auto options = torch::dtype(type).device(device).requires_grad(true);
    const auto a = torch::ones({8, 8}, options);
    const auto b = torch::ones({8}, options);
    const auto x = torch::ones({2, 8}, options);
    (torch::nn::functional::linear(x, a, b).mm(a).sum()).backward();
  }
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  // A fixed number of threads, for bit-identical results.
  at::set_num_threads(2);
  reprise::count_cpu_memory();
  if (reprise::testing::device().is_cuda()) {
    // Otherwise cuDNN may choose algorithms that sum in varying order. Adam turns even
    // the smallest rounding error of a zero gradient into a full step.
    reprise::compat::set_cuda_deterministic(true);
    warm_up(reprise::testing::device());
  }
  return RUN_ALL_TESTS();
}
