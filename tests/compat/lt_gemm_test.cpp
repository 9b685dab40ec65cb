#include "compat/lt_gemm.h"

#include "compat/cuda.h"
#include "support.h"

#include <torch/types.h>

#include <string>
#include <vector>

namespace reprise {
namespace {

using compat::lt_gemm;
using testing::on_device;
using testing::relative_error;
using torch::Tensor;

struct Sizes {
  int64_t m, n, k;
};

/// A matrix (rows, columns), column-major if `turned`, with unused columns if `wide`.
Tensor make_matrix(int64_t rows, int64_t columns, torch::ScalarType type,
                   bool turned, bool wide = false) {
  const auto options = on_device(torch::kFloat);
  const int64_t unused = wide ? 64 : 0;
  if (turned) return make_matrix(columns, rows, type, false, wide).t();
  return torch::randn({rows, columns + unused}, options)
      .to(type)
      .narrow(1, 0, columns);
}

double allowed_error(torch::ScalarType out) {
  return out == torch::kFloat ? 1e-5 : out == torch::kHalf ? 5e-4 : 4e-3;
}

TEST(LtGemm, LeavesSmallProductsAlone) {
  const auto options = on_device(torch::kBFloat16);
  const Tensor a = torch::ones({16, 32}, options);
  const Tensor b = torch::ones({32, 16}, options);
  const Tensor out = torch::full({16, 16}, 7, options);
  EXPECT_FALSE(lt_gemm({a, b, out, {}, {}}));
  EXPECT_TRUE(out.eq(7).all().item<bool>());
}

class LtGemmOnCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!testing::device().is_cuda()) GTEST_SKIP() << "CUDA only";
    if (!compat::lt_gemm_built()) GTEST_SKIP() << "built without cublasLt";
    torch::manual_seed(11);
    // Deterministic computations do not use it.
    compat::set_cuda_deterministic(false);
  }
  void TearDown() override {
    if (testing::device().is_cuda()) compat::set_cuda_deterministic(true);
  }
};

TEST_F(LtGemmOnCuda, MatchesDoublePrecisionInAllLayouts) {
  int supported = 0;
  for (const auto& [m, n, k] : {Sizes{1024, 768, 1536},
                                {1000, 776, 1032},
                                {1001, 2048, 264},
                                {333, 1001, 4096}}) {
    for (const auto type : {torch::kBFloat16, torch::kHalf}) {
      for (int layout = 0; layout < 8; ++layout) {
        const Tensor a = make_matrix(m, k, type, layout & 1, layout & 4);
        const Tensor b = make_matrix(k, n, type, layout & 2, layout & 4);
        const Tensor exact = a.to(torch::kDouble).mm(b.to(torch::kDouble));
        for (const auto out_type : {type, torch::kFloat}) {
          const Tensor out =
              torch::full({m, n}, 3, on_device(torch::kFloat)).to(out_type);
          if (!lt_gemm({a, b, out, {}, {}})) continue;
          ++supported;
          EXPECT_LT(relative_error(out.to(torch::kDouble), exact),
                    allowed_error(out_type))
              << m << " × " << n << " × " << k << ", layout " << layout;
          const Tensor again = torch::zeros_like(out);
          EXPECT_TRUE(lt_gemm({a, b, again, {}, {}}));
          EXPECT_TRUE(torch::equal(again, out));
        }
      }
    }
  }
  EXPECT_GE(supported, 3 * 2 * 8 * 2);  // odd rows in memory need not be
}

TEST_F(LtGemmOnCuda, AddsBiasAndAddend) {
  const int64_t m = 2048, n = 1600, k = 400;
  const Tensor a = make_matrix(m, k, torch::kBFloat16, false);
  const Tensor b = make_matrix(k, n, torch::kBFloat16, true);
  const Tensor product = a.to(torch::kDouble).mm(b.to(torch::kDouble));
  for (const auto type : {torch::kBFloat16, torch::kFloat}) {
    const Tensor bias = make_matrix(1, n, type, false).view({-1});
    const Tensor addend = make_matrix(m, n, type, false).mul_(20);
    for (const bool with_bias : {false, true}) {
      for (const bool in_place : {false, true}) {
        Tensor out = in_place ? addend.clone() : torch::zeros_like(addend);
        Tensor exact = product + addend.to(torch::kDouble);
        if (with_bias) exact = exact + bias.to(torch::kDouble);
        ASSERT_TRUE(lt_gemm(
            {a, b, out, with_bias ? bias : Tensor(), in_place ? out : addend}));
        EXPECT_LT(relative_error(out.to(torch::kDouble), exact),
                  allowed_error(type))
            << "bias " << with_bias << ", in place " << in_place;
      }
    }
  }
}

TEST_F(LtGemmOnCuda, RefusesWhatItCannotCompute) {
  const Tensor a = make_matrix(1024, 1024, torch::kBFloat16, false);
  const Tensor out = torch::zeros_like(a);
  EXPECT_FALSE(lt_gemm({a, a, out.t(), {}, {}}));
  EXPECT_FALSE(lt_gemm({a, a, out.to(torch::kHalf), {}, {}}));
  EXPECT_FALSE(lt_gemm({a.to(torch::kFloat),
                        a.to(torch::kFloat),
                        out.to(torch::kFloat),
                        {},
                        {}}));
  // Neither rows nor columns are contiguous.
  const Tensor wide = make_matrix(1024, 2048, torch::kBFloat16, false);
  EXPECT_FALSE(
      lt_gemm({wide.as_strided({1024, 1024}, {2048, 2}), a, out, {}, {}}));
  // Rows that begin at an odd address.
  EXPECT_FALSE(lt_gemm({wide.narrow(1, 1, 1024), a, out, {}, {}}));
  EXPECT_FALSE(lt_gemm({a, a, out, out.to(torch::kFloat)[0], {}}));
}

}  // namespace
}  // namespace reprise
