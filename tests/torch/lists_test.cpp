#include "support.h"

#include <reprise/torch/lists.h>

#include <limits>

namespace reprise {
namespace {

using testing::on_device;

TEST(Lists, CopiesEveryBitOfEveryType) {
  const std::vector<torch::Tensor> from = {
      torch::tensor({-0.0f, 1e-40f, std::numeric_limits<float>::infinity()})
          .to(on_device()),
      torch::scalar_tensor(7, on_device(torch::kLong)),
      torch::rand({3, 4}, on_device()).t(),
      torch::rand(5, on_device(torch::kDouble))};
  std::vector<torch::Tensor> to;
  for (const auto& tensor : from) to.push_back(torch::ones_like(tensor));
  compat::copy_list(to, from);
  for (size_t i = 0; i < from.size(); ++i) {
    EXPECT_TRUE(torch::equal(to[i], from[i])) << i;
  }
  EXPECT_TRUE(torch::signbit(to[0])[0].item<bool>());
  compat::copy_list({}, {});
}

}  // namespace
}  // namespace reprise
