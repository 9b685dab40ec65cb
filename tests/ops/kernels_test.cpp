#include "ops/kernels.h"

#include "ops/cuda/activation.h"
#include "ops/cuda/add_norm.h"
#include "ops/cuda/column_sums.h"
#include "ops/cuda/device.h"
#include "ops/cuda/image_conv.h"
#include "ops/cuda/norm_act_pool.h"
#include "ops/cuda/norm_relu.h"
#include "ops/cuda/tf32x3_gemm.h"
#include "support.h"

#include <functional>
#include <stdexcept>

namespace reprise::detail {
namespace {

using testing::on_device;

TEST(Kernels, AvailableOnCudaOnly) {
  EXPECT_FALSE(kernels_available(torch::kCPU));
  EXPECT_FALSE(kernels_available(torch::kCPU, 90));
  if (!testing::device().is_cuda()) return;
  EXPECT_EQ(kernels_available(testing::device()), kernels::built());
  // No device has this compute capability.
  EXPECT_FALSE(kernels_available(testing::device(), 1));
}

TEST(Kernels, LaunchThrowsInBuildsWithoutKernels) {
  if (kernels::built()) GTEST_SKIP() << "this build has kernels";
  EXPECT_EQ(kernels::compute_capability(0), 0);
  EXPECT_EQ(kernels::multiprocessors(0), 0);
  EXPECT_THROW(kernels::activation_forward({}, nullptr), std::logic_error);
  EXPECT_THROW(kernels::column_sums({}, nullptr), std::logic_error);
  EXPECT_THROW(kernels::tf32x3_gemm({}, nullptr), std::logic_error);
}

TEST(Kernels, Eligibility) {
  const bool here = kernels_available(testing::device());
  const auto x = torch::ones({2, 8, 4}, on_device(torch::kFloat));
  EXPECT_EQ(kernel_eligible(x, {}), here);
  EXPECT_FALSE(kernel_eligible(x.cpu(), {}));
  EXPECT_FALSE(kernel_eligible(x.transpose(0, 1), {}));
  EXPECT_FALSE(kernel_eligible(x.narrow(0, 0, 0), {}));
  EXPECT_FALSE(kernel_eligible(x.to(torch::kHalf), {}));
  KernelOperand half;
  half.type = KernelOperand::Type::kHalf;
  EXPECT_FALSE(kernel_eligible(x, half));
  EXPECT_EQ(kernel_eligible(x.to(torch::kBFloat16), half), here);
  KernelOperand images;
  images.min_dim = images.max_dim = 4;
  EXPECT_FALSE(kernel_eligible(x, images));
  EXPECT_EQ(kernel_eligible(x.unsqueeze(0), images), here);
}

TEST(Kernels, ElementTypes) {
  const auto x = torch::ones({2});
  EXPECT_EQ(kernel_dtype({}), kernels::DType::kNone);
  EXPECT_EQ(kernel_dtype(x), kernels::DType::kFloat32);
  EXPECT_EQ(kernel_dtype(x.to(torch::kHalf)), kernels::DType::kFloat16);
  EXPECT_EQ(kernel_dtype(x.to(torch::kBFloat16)), kernels::DType::kBFloat16);
  EXPECT_FALSE(is_float32({}));
  EXPECT_FALSE(is_half({}));
  EXPECT_FALSE(is_half(x));
  EXPECT_EQ(float_data(x), x.data_ptr<float>());
  EXPECT_EQ(float_data(torch::empty({0})), nullptr);
}

TEST(Kernels, PartsAndScratchMemory) {
  kernels::AddNormShape add_norm;
  add_norm.rows = 5;
  add_norm.columns = 64;
  add_norm.multiprocessors = 100;
  EXPECT_EQ(add_norm.parts(), 2);
  EXPECT_EQ(add_norm.scratch_size(), 2 * 2 * 64);
  add_norm.kind = kernels::NormKind::kRms;
  EXPECT_EQ(add_norm.scratch_size(), 2 * 64);
  add_norm.rows = 1 << 20;
  EXPECT_EQ(add_norm.parts(), 300);
  add_norm.columns = 1536;
  EXPECT_EQ(add_norm.parts(), 400);
  add_norm.columns = 8192;
  EXPECT_EQ(add_norm.parts(), 100);

  kernels::ColumnSumsShape sums;
  sums.columns = 8;
  sums.rows = 50;
  EXPECT_EQ(sums.parts(), 1);
  sums.rows = 640;
  EXPECT_EQ(sums.scratch_size(), 80);
  sums.rows = 1 << 20;
  EXPECT_EQ(sums.parts(), 32);

  kernels::NormReluShape norm;
  norm.samples = 2;
  norm.channels = 9;
  norm.height = 150;
  norm.width = 140;
  EXPECT_EQ(norm.statistics(), 9);
  EXPECT_EQ(norm.parts(), 2);
  EXPECT_EQ(norm.scratch_size(), 2 * 18 * 2);
  norm.groups = 3;
  EXPECT_EQ(norm.statistics(), 6);
}

TEST(Kernels, PartsOfChannelsLastImages) {
  kernels::RowsShape rows;
  rows.samples = 2;
  rows.channels = 320;
  rows.height = rows.width = 100;
  rows.type = kernels::DType::kBFloat16;
  EXPECT_EQ(rows.vectors(), 40);
  EXPECT_EQ(rows.column_blocks(), 2);
  EXPECT_EQ(rows.vectors_of_block(), 20);
  EXPECT_EQ(rows.rows_of_block(), 12);
  EXPECT_EQ(rows.statistics(), 320);
  EXPECT_EQ(rows.moment_parts(), 264);
  EXPECT_EQ(rows.scratch_size(), 2 * 264 * 320);
  rows.groups = 32;
  EXPECT_EQ(rows.statistics(), 64);
  EXPECT_EQ(rows.rows_of_instance(), 10000);
  EXPECT_EQ(rows.moment_parts(), 132);
  rows.height = rows.width = 3;  // less than four rows per thread
  EXPECT_EQ(rows.sum_parts(), 1);
  const kernels::PoolWindow window{3, 1};
  EXPECT_EQ(window.outputs(112), 56);
  EXPECT_EQ(window.outputs(7), 4);
}

TEST(Kernels, SupportedConvolutions) {
  kernels::ImageConvShape conv;
  conv.samples = 2;
  conv.channels = 3;
  conv.height = 9;
  conv.width = 10;
  conv.filters = 9;
  conv.kernel_size = 3;
  conv.stride = 1;
  conv.padding = 1;
  EXPECT_TRUE(conv.supported());
  EXPECT_EQ(conv.out_height(), 9);
  EXPECT_EQ(conv.quads(), 2 * 9 * 3);
  EXPECT_EQ(conv.filter_groups(), 2);
  EXPECT_EQ(conv.scratch_size(), 1 * 3 * 2 * 8 * 10);
  using Change = std::function<void(kernels::ImageConvShape&)>;
  for (const Change& change : std::vector<Change>{
           [](auto& c) { c.channels = 5; }, [](auto& c) { c.kernel_size = 5; },
           [](auto& c) { c.stride = 3; }, [](auto& c) { c.samples = 0; },
           [](auto& c) { c.height = c.padding = 0; }}) {
    auto other = conv;
    change(other);
    EXPECT_FALSE(other.supported());
  }
}

TEST(Kernels, SupportedGemms) {
  alignas(16) const float values[8] = {};
  kernels::Tf32x3Gemm gemm;
  gemm.a = gemm.b = values;
  gemm.m = gemm.n = gemm.k = gemm.lda = gemm.ldb = gemm.ldc = 64;
  EXPECT_TRUE(gemm.supported());
  auto other = gemm;
  other.k = 66;
  EXPECT_FALSE(other.supported());
  other = gemm;
  other.a = values + 1;
  EXPECT_FALSE(other.supported());
  other = gemm;
  other.lda = int64_t{1} << 32;
  EXPECT_FALSE(other.supported());
}

}  // namespace
}  // namespace reprise::detail
