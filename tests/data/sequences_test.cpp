#include "support.h"

#include <reprise/data/sequences.h>

#include <gtest/gtest.h>

namespace {

using namespace reprise::testing;
using reprise::pack_batch;
using reprise::pad_batch;

/// Element by element, for (t) and (t, D).
TEST(Sequences, PaddingKeepsEveryElement) {
  for (const int64_t width : {0, 3}) {
    std::vector<torch::Tensor> list;
    for (const int64_t length : {3, 0, 5, 1}) {
      list.push_back(width == 0 ? torch::randn({length})
                                : torch::randn({length, width}));
    }
    for (const auto& [length, multiple, expected] :
         std::vector<std::tuple<int64_t, int64_t, int64_t>>{
             {0, 1, 5}, {0, 4, 8}, {7, 1, 7}, {7, 8, 8}}) {
      const auto batch = pad_batch(
          list, {.value = -2, .length = length, .multiple = multiple});
      ASSERT_EQ(batch.values.size(1), expected);
      EXPECT_EQ(batch.mask.sizes(), (torch::IntArrayRef{4, expected}));
      for (int64_t i = 0; i < 4; ++i) {
        const auto& sequence = list[static_cast<size_t>(i)];
        EXPECT_EQ(batch.lengths[i].item<int64_t>(), sequence.size(0));
        for (int64_t t = 0; t < expected; ++t) {
          const bool real = t < sequence.size(0);
          EXPECT_EQ(batch.mask[i][t].item<bool>(), real);
          const auto value = batch.values[i][t];
          EXPECT_TRUE(real ? same(value, sequence[t])
                           : same(value, torch::full_like(value, -2)));
        }
      }
    }
  }
}

TEST(Sequences, PackingKeepsEveryElement) {
  const std::vector<torch::Tensor> list = {
      torch::tensor({7, 8, 9}), torch::tensor({5}), torch::tensor({6, 4})};
  const auto batch = pack_batch(list);
  EXPECT_TRUE(same(batch.values, torch::tensor({7, 8, 9, 5, 6, 4})));
  EXPECT_TRUE(same(batch.cu_seqlens, torch::tensor({0, 3, 4, 6}, torch::kInt)));
  EXPECT_TRUE(same(batch.segments, torch::tensor({1, 1, 1, 2, 3, 3})));
  EXPECT_TRUE(same(batch.positions, torch::tensor({0, 1, 2, 0, 0, 1})));
  EXPECT_EQ(batch.longest, 3);
  EXPECT_EQ(
      pack_batch({torch::zeros({2, 3}), torch::zeros({1, 3})}).values.sizes(),
      (torch::IntArrayRef{3, 3}));
}

TEST(Sequences, ErrorsSayWhatToDo) {
  const auto expect = [](const std::function<void()>& body,
                         const std::string& part) {
    const auto text = error_of(body);
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  const auto a = torch::zeros({3}), b = torch::zeros({2, 4});
  expect([&] { pad_batch({}); }, "[pad_batch] expected sequences, got none");
  expect([&] { pack_batch({}); }, "[pack_batch] expected sequences, got none");
  expect([&] { pad_batch({a, b}); }, "only their lengths may differ");
  expect([&] { pad_batch({b, torch::zeros({2, 5})}); }, "only their lengths");
  expect([&] { pack_batch({a, a.to(torch::kLong)}); }, "only their lengths");
  expect([&] { pad_batch({a, {}}); }, "an undefined tensor at 1");
  expect([&] { pad_batch({torch::zeros({})}); }, "shape (t) or (t, D)");
  expect([&] { pad_batch({a}, {.length = 2}); },
         "at most 2 elements, got 3; shorten them");
  expect([&] { pad_batch({a}, {.multiple = 0}); }, "a multiple above 0");
}

}  // namespace
