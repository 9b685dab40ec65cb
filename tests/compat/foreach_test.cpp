#include "compat/foreach.h"

#include "support.h"

#include <limits>

namespace reprise {
namespace {

using testing::on_device;

TEST(Foreach, CopiesEveryBitOfEveryType) {
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

TEST(Foreach, AddsEachToItsOwn) {
  std::vector<at::Tensor> sums, terms, wanted;
  for (const auto type : {torch::kFloat, torch::kDouble, torch::kFloat}) {
    sums.push_back(torch::randn({3, 5}, on_device(type)));
    terms.push_back(torch::randn({3, 5}, on_device(type)));
    wanted.push_back(sums.back() + terms.back());
  }
  const void* place = sums[0].data_ptr();
  compat::add_list(sums, terms);
  for (size_t i = 0; i < sums.size(); ++i) {
    EXPECT_TRUE(torch::equal(sums[i], wanted[i])) << i;
  }
  EXPECT_EQ(sums[0].data_ptr(), place);
}

TEST(Foreach, ZerosEveryTensorWhereItIs) {
  std::vector<torch::Tensor> list = {torch::ones({3, 2}, on_device()),
                                     torch::ones({4}, on_device(torch::kLong)),
                                     torch::ones({}, on_device())};
  std::vector<const void*> places;
  for (const auto& tensor : list) places.push_back(tensor.data_ptr());
  compat::zero_list(list);
  for (size_t i = 0; i < list.size(); ++i) {
    EXPECT_EQ(list[i].data_ptr(), places[i]);
    EXPECT_EQ(list[i].abs().sum().item<double>(), 0);
  }
  compat::zero_list({});
}

}  // namespace
}  // namespace reprise
