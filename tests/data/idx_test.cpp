#include "files.h"
#include "support.h"

#include <reprise/data/dataset.h>

#include <gtest/gtest.h>

#include <iterator>

namespace {

using namespace reprise::testing;
using reprise::DataOptions;
using reprise::open_dataset;
using reprise::Split;
using ::testing::AssertionFailure;
using ::testing::AssertionResult;
using ::testing::AssertionSuccess;

const std::string kImages = "train-images-idx3-ubyte";
const std::string kLabels = "train-labels-idx1-ubyte";

AssertionResult has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return AssertionSuccess();
  return AssertionFailure() << "no \"" << part << "\" in: " << text;
}

TEST(Idx, ReturnsImagesAndLabelsInTheRequestedOrder) {
  const Folder folder;
  write_bytes(folder / kImages, images(5));
  write_bytes(folder / kLabels, labels(5));
  const auto data = open_dataset({.name = folder / kImages, .classes = 3});
  EXPECT_EQ(data->size(), 5);
  EXPECT_EQ(data->count(3), 1);
  const auto batch = data->get({4, 0, 4});
  EXPECT_EQ(batch.samples, 3);
  EXPECT_EQ(batch.count, 3);
  const auto ramp = torch::arange(6, torch::kUInt8).view({1, 1, 2, 3});
  EXPECT_TRUE(same(batch.tensors[0], torch::cat({ramp + 40, ramp, ramp + 40})));
  EXPECT_TRUE(same(batch.tensors[1], torch::tensor({1, 0, 1}, torch::kLong)));
  EXPECT_EQ(data->description(), kImages + ", 5 images of 1×2×3, 3 classes");
}

TEST(Idx, RepeatsGrayscaleChannels) {
  const Folder folder;
  write_bytes(folder / kImages, images(2));
  write_bytes(folder / kLabels, labels(2));
  const auto grey = open_dataset({.name = folder / kImages});
  const auto colour = open_dataset({.name = folder / kImages, .channels = 3});
  EXPECT_TRUE(same(colour->get({1, 0}).tensors[0],
                   grey->get({1, 0}).tensors[0].expand({2, 3, 2, 3})));
}

TEST(Idx, DetectsGzipByContent) {
  const Folder folder;
  write_bytes(folder / "plain/" + kImages, images(4));
  write_bytes(folder / "plain/" + kLabels, labels(4));
  const auto plain = open_dataset({.name = folder / "plain/" + kImages});
  std::filesystem::create_directories(folder / "gz");
  write_gzipped(folder / "gz/" + kImages + ".gz", images(4));
  write_gzipped(folder / "gz/" + kLabels,
                labels(4));  // detected by content, not by name
  const auto gz = open_dataset({.name = folder / "gz/" + kImages + ".gz"});
  EXPECT_TRUE(same(gz->get({0, 3}).tensors[0], plain->get({0, 3}).tensors[0]));
  EXPECT_TRUE(same(gz->get({0, 3}).tensors[1], plain->get({0, 3}).tensors[1]));
}

TEST(Idx, FindsTheTestSplitNextToTheTrainingFile) {
  const Folder folder;
  write_bytes(folder / kImages, images(5));
  write_bytes(folder / kLabels, labels(5));
  DataOptions options{.name = folder / kImages, .split = Split::kTest};
  EXPECT_TRUE(has(error_of_opening(options), "t10k-images-idx3-ubyte"));
  write_gzipped(folder / "t10k-images-idx3-ubyte.gz", images(2));
  write_bytes(folder / "t10k-labels-idx1-ubyte", labels(2));
  const auto test = open_dataset(options);
  EXPECT_EQ(test->size(), 2);
  // Both splits use the same mean and standard deviation.
  options.split = Split::kTrain;
  const auto train = open_dataset(options);
  EXPECT_EQ(test->mean(), train->mean());
  EXPECT_EQ(test->stddev(), train->stddev());
}

TEST(Idx, MeasuresMeanAndStandardDeviation) {
  const Folder folder;
  write_bytes(folder / kImages, images(5));
  write_bytes(folder / kLabels, labels(5));
  const auto data = open_dataset({.name = folder / kImages});
  const auto pixels =
      data->get({0, 1, 2, 3, 4}).tensors[0].to(torch::kDouble).div(255);
  EXPECT_NEAR(data->mean(), pixels.mean().item<double>(), 1e-12);
  EXPECT_NEAR(data->stddev(), pixels.std(false).item<double>(), 1e-12);
}

TEST(Idx, StandardDeviationOfConstantImagesIsOne) {
  const Folder folder;
  write_bytes(folder / kImages, idx_bytes({2, 2, 2}, std::string(8, '\7')));
  write_bytes(folder / kLabels, labels(2));
  EXPECT_EQ(open_dataset({.name = folder / kImages})->stddev(), 1);
}

TEST(Idx, ReportsInvalidImages) {
  const Folder folder;
  write_bytes(folder / kLabels, labels(5));
  const auto error = [&](const std::string& bytes) {
    write_bytes(folder / kImages, bytes);
    const std::string text = error_of_opening({.name = folder / kImages});
    EXPECT_TRUE(has(text, folder / kImages));
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    return text;
  };
  EXPECT_TRUE(has(error(labels(5)), "0x00000803), found 0x00000801"));
  EXPECT_TRUE(has(error("some text, long enough"), "found 0x736f6d65"));
  EXPECT_TRUE(has(error(""), "header of 16 bytes, found 0"));
  EXPECT_TRUE(has(error(images(5).substr(0, 10)), "of 16 bytes, found 10"));
  EXPECT_TRUE(has(error(images(5).substr(0, 45)),
                  "expected 30 bytes of images after the header, found 29"));
  EXPECT_TRUE(has(error(images(5) + "x"), "found more"));
  EXPECT_TRUE(has(error(idx_bytes({0, 2, 3}, "")), "dimension 1 to be 0"));
  const uint32_t most = 0xffffffffu;
  EXPECT_TRUE(has(error(idx_bytes({most, most, most}, "x")), "2^63"));
  // Rejected before any memory is allocated.
  EXPECT_TRUE(has(error(idx_bytes({most, 1000, 1000}, "x")), "found 1"));
}

TEST(Idx, ReportsCorruptGzipFiles) {
  const Folder folder;
  write_bytes(folder / kLabels, labels(200));
  write_gzipped(folder / kImages, images(200));
  std::ifstream file(folder / kImages, std::ios::binary);
  const std::string whole{std::istreambuf_iterator<char>(file), {}};
  const auto error = [&](const std::string& bytes) {
    write_bytes(folder / kImages, bytes);
    const std::string text = error_of_opening({.name = folder / kImages});
    EXPECT_TRUE(has(text, folder / kImages));
    return text;
  };
  for (const size_t kept : {size_t{12}, whole.size() / 2, whole.size() - 4}) {
    EXPECT_TRUE(has(error(whole.substr(0, kept)), "expected gzip data"))
        << kept;
  }
  std::string changed = whole;
  changed[changed.size() - 6] ^= 1;  // in the checksum
  EXPECT_TRUE(has(error(changed), "expected gzip data"));
  const std::string bomb = idx_bytes({0xffffffffu, 1000, 1000}, "x");
  write_gzipped(folder / kImages, bomb);
  EXPECT_TRUE(has(error_of_opening({.name = folder / kImages}), "at most"));
}

TEST(Idx, ReportsInvalidLabels) {
  const Folder folder;
  write_bytes(folder / kImages, images(5));
  DataOptions options{.name = folder / kImages};
  EXPECT_TRUE(has(error_of_opening(options), kLabels));
  write_bytes(folder / kLabels, labels(4));
  EXPECT_TRUE(has(error_of_opening(options), "expected 5 labels"));
  EXPECT_TRUE(has(error_of_opening(options), "found 4"));
  write_bytes(folder / kLabels, images(5));
  EXPECT_TRUE(has(error_of_opening(options), "expected IDX labels"));
  write_bytes(folder / kLabels, labels(5));
  options.classes = 2;
  EXPECT_TRUE(has(error_of_opening(options), "2 classes, found 2 at image 2"));
  write_bytes(folder / "pictures", images(5));
  EXPECT_TRUE(has(error_of_opening({.name = folder / "pictures"}), "rename"));
}

TEST(Idx, RejectsIndicesOutOfRange) {
  const Folder folder;
  write_bytes(folder / kImages, images(2));
  write_bytes(folder / kLabels, labels(2));
  const auto data = open_dataset({.name = folder / kImages});
  EXPECT_TRUE(has(error_of([&] { data->get({2}); }), "below 2, got 2"));
  EXPECT_TRUE(has(error_of([&] { data->get({-1}); }), "below 2, got -1"));
}

}  // namespace
