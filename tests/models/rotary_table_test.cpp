#include "models/rotary_table.h"

#include "support.h"

#include <cmath>

namespace reprise::detail {
namespace {

using testing::error_of;
using testing::same;
using torch::Tensor;

RotaryOptions llama32(int64_t positions = 8) {
  return {64, positions, 500'000, RopeScaling{32, 1, 4, 8192}};
}

TEST(RotaryTable, FrequenciesAreAGeometricSeries) {
  const Tensor got = rotary_frequencies({6, 8, 1000, {}});
  ASSERT_EQ(got.sizes(), (std::vector<int64_t>{3}));
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_FLOAT_EQ(got[i].item<float>(),
                    static_cast<float>(std::pow(1000., -2. * double(i) / 6)));
  }
}

TEST(RotaryTable, ScalesFrequenciesAsLlama3) {
  // Computed by tests/fixtures/llama_reference.py: unchanged up to number 14, interpolated
  // to number 17, then divided by 32.
  const Tensor got = rotary_frequencies(llama32());
  const std::pair<int64_t, double> known[] = {{0, 1},
                                              {1, 0.663601279258728},
                                              {14, 0.0032114461064338684},
                                              {15, 0.0012905480107292533},
                                              {16, 0.000429556705057621},
                                              {17, 9.708286233944818e-05},
                                              {18, 1.9461638657958247e-05},
                                              {31, 9.418306490260875e-08}};
  for (const auto& [i, frequency] : known) {
    EXPECT_NEAR(got[i].item<double>() / frequency, 1, 1e-6) << i;
  }
  RotaryOptions plain = llama32();
  plain.scaling.reset();
  const Tensor unscaled = rotary_frequencies(plain);
  EXPECT_TRUE(same(got.narrow(0, 0, 15), unscaled.narrow(0, 0, 15)));
  EXPECT_TRUE(same(got.narrow(0, 18, 14), unscaled.narrow(0, 18, 14) / 32));
}

TEST(RotaryTable, HasCosinesAndSinesOfPositions) {
  RotaryTable table({6, 20, 100, {}});
  const auto [cos, sin] = table.get(testing::device(), 13);
  EXPECT_EQ(cos.sizes(), (std::vector<int64_t>{13, 3}));
  EXPECT_EQ(cos.scalar_type(), torch::kFloat);
  for (int64_t t = 0; t < 13; ++t) {
    for (int64_t i = 0; i < 3; ++i) {
      const double angle = double(t) * std::pow(100., -2. * double(i) / 6);
      EXPECT_NEAR(cos[t][i].item<double>(), std::cos(angle), 2e-6);
      EXPECT_NEAR(sin[t][i].item<double>(), std::sin(angle), 2e-6);
    }
  }
}

TEST(RotaryTable, IsMadeOnce) {
  RotaryTable table(llama32(20));
  const auto [cos, sin] = table.get(testing::device(), 3);
  const auto longer = table.get(testing::device(), 20);
  EXPECT_EQ(cos.data_ptr(), longer.first.data_ptr());
  EXPECT_EQ(sin.data_ptr(), longer.second.data_ptr());
  EXPECT_FALSE(cos.requires_grad());
}

TEST(RotaryTable, Errors) {
  RotaryTable table(llama32(20));
  EXPECT_NE(error_of([&] {
              table.get(testing::device(), 21);
            }).find("expected at most 20 positions, got 21"),
            std::string::npos);
  EXPECT_NE(error_of([] {
              rotary_frequencies({5, 8, 100, {}});
            }).find("expected an even number of channels per head, got 5"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise::detail
