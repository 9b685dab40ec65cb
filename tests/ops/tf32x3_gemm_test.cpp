#include "ops/tf32x3_gemm.h"

#include "support.h"

#include <reprise/ops/linear.h>
#include <reprise/ops/weight_copies.h>

#include <limits>

namespace reprise {
namespace {

using testing::device;
using testing::on_device;
using testing::take_gradients;
using torch::Tensor;

constexpr char kNeeds[] =
    "needs a device of compute capability 9.0 and a build with nvcc";

struct GemmShape {
  int64_t rows, in, out;
};

/// A layer with WeightCopies in float32: y, and the gradients of x, weight and bias after two
/// micro-batches.
struct GemmLayer {
  GemmLayer(const GemmShape& shape, ops::WeightLayout layout) : layout(layout) {
    torch::manual_seed(3);
    const auto options = on_device(torch::kFloat);
    x = torch::randn({shape.rows, shape.in}, options).requires_grad_();
    weight = torch::randn(layout == ops::WeightLayout::kOutIn
                              ? std::vector<int64_t>{shape.out, shape.in}
                              : std::vector<int64_t>{shape.in, shape.out},
                          options)
                 .requires_grad_();
    bias = torch::randn({shape.out}, options).requires_grad_();
    slope = torch::randn({shape.rows, shape.out}, options);
  }

  Tensors run(bool kernel) const {
    detail::allow_tf32x3_gemm(kernel);
    const WeightCopies copies({weight, bias}, torch::kFloat);
    Tensor y;
    for (int i = 0; i < 2; ++i) {
      y = ops::linear(x, weight, bias, layout);
      y.backward(slope);
    }
    detail::allow_tf32x3_gemm(true);
    Tensors results = {y.detach()};
    for (auto& one : take_gradients({x, weight, bias})) results.push_back(one);
    return results;
  }

  /// The same in float64.
  Tensors exact() const {
    const torch::NoGradGuard none;
    const auto wide = [](const Tensor& tensor) {
      return tensor.detach().to(torch::kDouble);
    };
    const Tensor w =
        layout == ops::WeightLayout::kOutIn ? wide(weight) : wide(weight).t();
    const Tensor dw = 2 * torch::mm(wide(slope).t(), wide(x));
    return {torch::addmm(wide(bias), wide(x), w.t()),
            2 * torch::mm(wide(slope), w),
            layout == ops::WeightLayout::kOutIn ? dw : dw.t(),
            2 * wide(slope).sum(0)};
  }

  ops::WeightLayout layout;
  Tensor x, weight, bias, slope;
};

double error_of_sum(const Tensor& got, const Tensor& wanted) {
  return ((got.to(torch::kDouble) - wanted).norm() / wanted.norm())
      .item<double>();
}

// Covers all three tile widths, one and two blocks along the depth, and remainders in each
// direction.
const std::vector<GemmShape> kGemmShapes = {
    {512, 1024, 1024}, {512, 1024, 3072}, {512, 1024, 4096}, {512, 4096, 1024},
    {500, 1028, 1000}, {772, 500, 1004},  {68, 2052, 2500}};

TEST(Tf32x3Gemm, IsAsAccurateAsLibrary) {
  if (!detail::uses_tf32x3_gemm(device())) GTEST_SKIP() << kNeeds;
  for (const GemmShape& shape : kGemmShapes) {
    for (const auto layout :
         {ops::WeightLayout::kOutIn, ops::WeightLayout::kInOut}) {
      const GemmLayer layer(shape, layout);
      const Tensors wanted = layer.exact();
      const Tensors kernel = layer.run(true), library = layer.run(false);
      for (size_t i = 0; i < wanted.size(); ++i) {
        const double ours = error_of_sum(kernel[i], wanted[i]);
        EXPECT_LT(ours, 5e-7) << i;
        EXPECT_LT(ours, 1.2 * error_of_sum(library[i], wanted[i]) + 1e-8)
            << shape.rows << " " << shape.in << " " << shape.out << ", " << i;
      }
      // The kernel ran: it adds in another order.
      for (int i : {0, 1, 2}) EXPECT_FALSE(kernel[i].equal(library[i])) << i;
    }
  }
}

TEST(Tf32x3Gemm, IsReproducible) {
  if (!detail::uses_tf32x3_gemm(device())) GTEST_SKIP() << kNeeds;
  const GemmLayer layer({512, 4096, 1024}, ops::WeightLayout::kOutIn);
  const Tensors first = layer.run(true);
  for (int i = 0; i < 20; ++i) {
    const Tensors again = layer.run(true);
    for (size_t j = 0; j < first.size(); ++j) {
      ASSERT_TRUE(again[j].equal(first[j])) << i << " " << j;
    }
  }
}

TEST(Tf32x3Gemm, KeepsRangeOfFloat32) {
  if (!detail::uses_tf32x3_gemm(device())) GTEST_SKIP() << kNeeds;
  const GemmLayer layer({512, 1024, 1024}, ops::WeightLayout::kOutIn);
  const torch::NoGradGuard none;
  for (const double scale : {1e-30, 1e30}) {
    layer.x.set_data(layer.x.detach() * scale);
    detail::allow_tf32x3_gemm(true);
    const WeightCopies copies({layer.weight, layer.bias}, torch::kFloat);
    const Tensor got = ops::linear(layer.x, layer.weight);
    const Tensor wanted = torch::mm(layer.x.to(torch::kDouble),
                                    layer.weight.to(torch::kDouble).t());
    EXPECT_LT(error_of_sum(got, wanted), 5e-7) << scale;
    layer.x.set_data(layer.x.detach() / scale);
  }
  layer.x.detach()[5][7].fill_(std::numeric_limits<float>::quiet_NaN());
  layer.x.detach()[6][7].fill_(std::numeric_limits<float>::infinity());
  const WeightCopies copies({layer.weight, layer.bias}, torch::kFloat);
  const Tensor finite = ops::linear(layer.x, layer.weight).isfinite();
  EXPECT_FALSE(finite[5].any().item<bool>());
  EXPECT_FALSE(finite[6].any().item<bool>());
  EXPECT_EQ(finite.sum().item<int64_t>(), 510 * 1024);
}

// Unsupported sizes give the bits of the library.
TEST(Tf32x3Gemm, UnsupportedSizesUseLibrary) {
  if (!detail::uses_tf32x3_gemm(device())) GTEST_SKIP() << kNeeds;
  for (const GemmShape& shape : std::vector<GemmShape>{
           {510, 1022, 1026}, {32, 4096, 1024}, {64, 64, 64}}) {
    const GemmLayer layer(shape, ops::WeightLayout::kOutIn);
    const Tensors kernel = layer.run(true), library = layer.run(false);
    for (size_t i = 0; i < kernel.size(); ++i) {
      EXPECT_TRUE(kernel[i].equal(library[i])) << shape.rows << " " << i;
    }
  }
}

}  // namespace
}  // namespace reprise
