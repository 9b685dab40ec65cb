#include "compat/cuda.h"
#include "support.h"

#include <reprise/memory/meter.h>

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/linear.h>

namespace {

/// cuBLAS takes a workspace for each thread at its first use and never gives it
/// back; tests that compare live bytes must not see that.
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
  // Bit-identity must not depend on how work is divided among threads.
  at::set_num_threads(2);
  reprise::count_cpu_memory();
  if (reprise::testing::device().is_cuda()) {
    // Else cuDNN may take algorithms that add up in a changing order, and Adam makes
    // a step of full size of what is left of a gradient that should be zero.
    reprise::compat::set_cuda_deterministic(true);
    warm_up(reprise::testing::device());
  }
  return RUN_ALL_TESTS();
}
