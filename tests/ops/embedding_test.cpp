#include "support.h"

#include <reprise/ops/embedding.h>
#include <reprise/ops/weight_copies.h>

#include <torch/nn/modules/embedding.h>

namespace reprise {
namespace {

using testing::on_device;
using testing::relative_error;
using testing::same;
using torch::Tensor;

torch::nn::Embedding make_table(std::optional<int64_t> padding) {
  auto options = torch::nn::EmbeddingOptions(20, 6);
  if (padding) options.padding_idx(*padding);
  torch::nn::Embedding table(options);
  table->to(testing::device());
  return table;
}

/// Gradient of the table after two micro-batches. Most tokens occur several times.
Tensor gradient_of(const torch::nn::Embedding& table, const Tensor& tokens) {
  Tensor weight = table->weight;
  weight.mutable_grad() = Tensor();
  for (int i = 0; i < 2; ++i) {
    const Tensor y = ops::embedding(table, tokens);
    EXPECT_EQ(y.sizes(), (std::vector<int64_t>{3, 30, 6}));
    (y * (y.detach() + 1 + i)).sum().backward();
  }
  return weight.grad().clone();
}

TEST(Embedding, DirectGradientMatchesAutograd) {
  torch::manual_seed(8);
  const Tensor tokens = torch::randint(20, {3, 30}, on_device(torch::kLong));
  for (const auto padding :
       {std::optional<int64_t>(), std::optional<int64_t>(3)}) {
    const auto table = make_table(padding);
    const Tensor wanted = gradient_of(table, tokens);
    EXPECT_TRUE(same(ops::embedding(table, tokens),
                     ops::fallback::embedding(table, tokens)));
    WeightCopiesOptions options;
    options.embedding_tables = {table->weight};
    WeightCopies copies({}, torch::kBFloat16, options);
    EXPECT_TRUE(copies.copies().empty());
    EXPECT_TRUE(WeightCopies::has(table->weight));
    EXPECT_FALSE(WeightCopies::find(table->weight, torch::kBFloat16).defined());
    const Tensor got = gradient_of(table, tokens);
    EXPECT_LT(relative_error(got, wanted), 1e-6);
    if (padding) {
      EXPECT_TRUE(got[*padding].eq(0).all().item<bool>());
    }
    // Reproducible: the order of additions is fixed.
    EXPECT_TRUE(same(got, gradient_of(table, tokens)));
    copies.expire();
    EXPECT_TRUE(same(gradient_of(table, tokens), wanted));
  }
}

TEST(Embedding, AddsToExistingGradient) {
  const auto table = make_table({});
  WeightCopiesOptions options;
  options.embedding_tables = {table->weight};
  const WeightCopies copies({}, torch::kFloat, options);
  Tensor weight = table->weight;
  weight.mutable_grad() = torch::ones_like(weight.detach());
  const Tensor before = weight.grad();
  const Tensor tokens = torch::zeros({4}, on_device(torch::kLong));
  ops::embedding(table, tokens).sum().backward();
  EXPECT_EQ(weight.grad().data_ptr(), before.data_ptr());
  EXPECT_EQ(weight.grad()[0][0].item<float>(), 5);
  EXPECT_EQ(weight.grad()[1][0].item<float>(), 1);
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(ops::embedding(table, tokens).requires_grad());
}

}  // namespace
}  // namespace reprise
