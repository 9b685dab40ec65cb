#include "compat/threads.h"
#include "support.h"

#include <reprise/data/dataset.h>
#include <reprise/data/loader.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <thread>

namespace {

using namespace reprise::testing;
using reprise::Batch;
using reprise::move_to;
using reprise::prepare;

Batch images(int64_t count, int64_t channels, int64_t side) {
  torch::manual_seed(0);
  const auto grey = torch::randint(0, 256, {count, 1, side, side});
  return {.tensors = {grey.to(torch::kUInt8)
                          .expand({count, channels, side, side})
                          .contiguous(),
                      torch::arange(count, torch::kLong)},
          .samples = count,
          .count = count};
}

/// Reference bilinear interpolation: pixel centers at half-integers, clamped edges.
double bilinear(const torch::Tensor& image, int64_t size, int64_t y,
                int64_t x) {
  const int64_t side = image.size(0);
  const double scale = static_cast<double>(side) / static_cast<double>(size);
  const auto place = [&](int64_t at) {
    return std::max(0.0, (static_cast<double>(at) + 0.5) * scale - 0.5);
  };
  const double v = place(y), u = place(x);
  const auto row = static_cast<int64_t>(v), column = static_cast<int64_t>(u);
  const double down = v - static_cast<double>(row);
  const double right = u - static_cast<double>(column);
  const auto pixel = [&](int64_t r, int64_t c) {
    return image[std::min(r, side - 1)][std::min(c, side - 1)].item<double>() /
           255;
  };
  return (1 - down) * ((1 - right) * pixel(row, column) +
                       right * pixel(row, column + 1)) +
         down * ((1 - right) * pixel(row + 1, column) +
                 right * pixel(row + 1, column + 1));
}

TEST(Prepare, NormalizesWithoutResizing) {
  for (const int64_t size : {0, 6}) {
    Batch batch = images(3, 1, 6);
    const auto bytes = batch.tensors[0].to(torch::kDouble);
    move_to(batch, device());
    prepare(batch, {.image_size = size, .mean = 0.25, .stddev = 0.5});
    EXPECT_EQ(batch.tensors[0].scalar_type(), torch::kFloat);
    EXPECT_EQ(batch.tensors[0].device(), device());
    EXPECT_LT(relative_error((bytes / 255 - 0.25) / 0.5, batch.tensors[0]),
              1e-6);
    EXPECT_EQ(batch.tensors[1].dim(), 1);
  }
}

TEST(Prepare, ResizesBilinearly) {
  Batch batch = images(2, 3, 4);
  const auto bytes = batch.tensors[0];
  move_to(batch, device());
  prepare(batch, {.image_size = 11, .mean = 0.1, .stddev = 0.3});
  ASSERT_EQ(batch.tensors[0].sizes(), (std::vector<int64_t>{2, 3, 11, 11}));
  const auto result = batch.tensors[0].cpu();
  for (int64_t y = 0; y < 11; ++y) {
    for (int64_t x = 0; x < 11; ++x) {
      EXPECT_NEAR(result[1][2][y][x].item<double>(),
                  (bilinear(bytes[1][2], 11, y, x) - 0.1) / 0.3, 1e-5);
    }
  }
}

TEST(Prepare, PixelTargetsAreTheClassOfBrightPixels) {
  Batch batch = images(3, 1, 4);
  const auto bytes = batch.tensors[0];
  move_to(batch, device());
  prepare(batch, {.image_size = 9, .mean = 0.4, .pixel_targets = true});
  ASSERT_EQ(batch.tensors[1].sizes(), (std::vector<int64_t>{3, 9, 9}));
  EXPECT_EQ(batch.tensors[1].scalar_type(), torch::kLong);
  const auto targets = batch.tensors[1].cpu();
  for (int64_t n = 0; n < 3; ++n) {
    for (int64_t y = 0; y < 9; ++y) {
      for (int64_t x = 0; x < 9; ++x) {
        const double value = bilinear(bytes[n][0], 9, y, x);
        if (std::abs(value - 0.5) < 1e-6) continue;
        EXPECT_EQ(targets[n][y][x].item<int64_t>(), value > 0.5 ? n + 1 : 0);
      }
    }
  }
}

TEST(Prepare, LeavesPreparedImagesUnchanged) {
  const reprise::PrepareOptions options{
      .image_size = 8, .mean = 0.1, .stddev = 0.3, .pixel_targets = true};
  Batch batch = images(2, 1, 4);
  prepare(batch, options);
  const auto inputs = batch.tensors[0].clone(),
             targets = batch.tensors[1].clone();
  prepare(batch, options);
  EXPECT_TRUE(same(batch.tensors[0], inputs));
  EXPECT_TRUE(same(batch.tensors[1], targets));
}

TEST(Prepare, GivesTheSameResultInLoaderWorkers) {
  const auto data = reprise::open_dataset(
      {.name = "random", .classes = 10, .channels = 3, .random_samples = 5});
  const reprise::PrepareOptions options{.image_size = 150,
                                        .mean = data->mean(),
                                        .stddev = data->stddev(),
                                        .pixel_targets = true};
  reprise::Loader plain(data, {.batch = 2});
  reprise::Loader prepared(
      data, {.batch = 2, .workers = 2, .transform = [&](Batch& batch) {
               prepare(batch, options);
             }});
  for (int i = 0; i < 3; ++i) {
    auto expected = plain.next();
    // On one thread, like a worker. With several threads, some versions of LibTorch
    // round differently.
    std::thread([&] {
      reprise::compat::run_operators_on_this_thread();
      prepare(*expected, options);
    }).join();
    const auto batch = prepared.next();
    EXPECT_TRUE(same(batch->tensors[0], expected->tensors[0]));
    EXPECT_TRUE(torch::equal(batch->tensors[1], expected->tensors[1]));
  }
}

TEST(Prepare, DoesNotModifyItsInput) {
  Batch batch = images(2, 1, 4);
  const auto inputs = batch.tensors[0], targets = batch.tensors[1];
  const auto before = inputs.clone(), labels = targets.clone();
  prepare(batch, {.mean = 0.1, .stddev = 0.3, .pixel_targets = true});
  EXPECT_TRUE(same(inputs, before));
  EXPECT_TRUE(same(targets, labels));
}

TEST(Prepare, LeavesTokensUnchanged) {
  Batch batch{.tensors = {torch::arange(6).view({2, 3}),
                          torch::arange(6).view({2, 3})}};
  const auto inputs = batch.tensors[0];
  prepare(batch, {.image_size = 8, .mean = 1});
  EXPECT_TRUE(batch.tensors[0].is_same(inputs));
}

TEST(Prepare, RejectsInvalidInput) {
  Batch batch = images(2, 1, 4);
  EXPECT_NE(
      error_of([&] { prepare(batch, {.stddev = 0}); }).find("stddev above 0"),
      std::string::npos);
  prepare(batch, {});
  EXPECT_NE(error_of([&] {
              prepare(batch, {.pixel_targets = true});
            }).find("per-pixel"),
            std::string::npos);
}

}  // namespace
