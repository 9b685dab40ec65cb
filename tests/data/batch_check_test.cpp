#include "data/batch_check.h"

#include "support.h"

#include <gtest/gtest.h>

namespace reprise::detail {
namespace {

using reprise::testing::error_of;

Batch two_samples() {
  return {.tensors = {torch::zeros({2, 3}), torch::zeros({2}, torch::kLong)},
          .samples = 2,
          .count = 5};
}

void expect_batch_error(const Batch& batch, const std::string& part) {
  const std::string text = error_of([&] { check_batch(batch, 2, 5); });
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(BatchCheck, SaysWhatABatchLacks) {
  check_batch(two_samples(), 2, 5);
  check_batch(two_samples(), 2, std::nullopt);
  Batch batch = two_samples();
  batch.tensors.clear();
  expect_batch_error(batch, "expected a batch with tensors, got none");
  batch = two_samples();
  batch.tensors[1] = torch::Tensor();
  expect_batch_error(batch, "tensor 1 of 2 is undefined; return an empty");
  batch = two_samples();
  batch.samples = 3;
  expect_batch_error(batch, "of the 2 samples asked for, got 3; set Batch");
  batch = two_samples();
  batch.count = 4;
  expect_batch_error(batch, "expected a count of 5, the sum of Dataset::count");
  batch.count = -1;
  expect_batch_error(batch, "at least 0, got -1");
}

TEST(BatchCheck, TypesStayThoseOfTheFirstBatch) {
  BatchTypes types;
  types.check(two_samples());
  Batch longer = two_samples();
  longer.tensors[0] = torch::zeros({2, 9});  // shapes may differ
  types.check(longer);
  const auto error = [&](const Batch& batch) {
    return error_of([&] { types.check(batch); });
  };
  Batch batch = two_samples();
  batch.tensors.pop_back();
  EXPECT_NE(error(batch).find("expected 2 tensors in every batch, as in the "
                              "first one, got 1; return the same"),
            std::string::npos);
  batch = two_samples();
  batch.tensors[1] = batch.tensors[1].to(torch::kInt);
  EXPECT_NE(error(batch).find("expected tensor 1 to be Long on cpu in every "
                              "batch, as in the first one, got Int on cpu; "
                              "convert it in get()"),
            std::string::npos)
      << error(batch);
  batch = two_samples();
  batch.tensors[0] = batch.tensors[0].to(torch::kMeta);
  EXPECT_NE(error(batch).find("got Float on meta"), std::string::npos);
}

TEST(BatchCheck, OrdersHaveIndicesOfTheDataset) {
  check_order({0, 2, 2}, 3);
  for (const int64_t wrong : {int64_t{-1}, int64_t{3}}) {
    const auto text = error_of([&] { check_order({0, wrong}, 3); });
    EXPECT_NE(text.find("from 0 to 2 in the order of an epoch, got"),
              std::string::npos)
        << text;
  }
}

}  // namespace
}  // namespace reprise::detail
