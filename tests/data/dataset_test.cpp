#include "environment.h"
#include "files.h"
#include "support.h"

#include <reprise/data/dataset.h>

#include <gtest/gtest.h>

#include <numeric>

namespace {

using namespace reprise::testing;
using reprise::DataOptions;
using reprise::open_dataset;
using reprise::Split;

void write_dataset(const std::string& folder, int count) {
  write_bytes(folder + "/train-images-idx3-ubyte", images(count));
  write_bytes(folder + "/train-labels-idx1-ubyte", labels(count));
  write_bytes(folder + "/t10k-images-idx3-ubyte", images(2));
  write_bytes(folder + "/t10k-labels-idx1-ubyte", labels(2));
}

TEST(Dataset, SearchesFoldersInOrder) {
  const Folder folder;
  const Environment cache("XDG_CACHE_HOME", (folder / "cache").c_str());
  const Environment own("REPRISE_DATA", (folder / "own").c_str());
  write_dataset(folder / "cache/reprise/mnist", 4);
  EXPECT_EQ(open_dataset({.name = "mnist"})->size(), 4);
  write_dataset(folder / "own/mnist", 5);
  const auto train = open_dataset({.name = "mnist"});
  EXPECT_EQ(train->size(), 5);
  EXPECT_EQ(train->description(), "mnist, 5 images of 1×2×3, 3 classes");
  EXPECT_EQ(train->mean(), 0.1307);
  EXPECT_EQ(train->stddev(), 0.3081);
  EXPECT_EQ(open_dataset({.name = "mnist", .split = Split::kTest})->size(), 2);
  write_dataset(folder / "own/fashion-mnist", 3);
  EXPECT_EQ(open_dataset({.name = "fashion-mnist"})->mean(), 0.2860);
}

TEST(Dataset, SearchesTheHomeDirectoryWithoutXdgCacheHome) {
  const Folder folder;
  const Environment own("REPRISE_DATA", nullptr);
  const Environment cache("XDG_CACHE_HOME", nullptr);
  const Environment home("HOME", (folder / "home").c_str());
  write_dataset(folder / "home/.cache/reprise/mnist", 3);
  EXPECT_EQ(open_dataset({.name = "mnist"})->size(), 3);
}

TEST(Dataset, SaysHowToDownloadAMissingDataset) {
  const Folder folder;
  const Environment own("REPRISE_DATA", (folder / "own").c_str());
  const Environment cache("XDG_CACHE_HOME", (folder / "cache").c_str());
  if (std::filesystem::exists("/usr/share/datasets/mnist")) {
    GTEST_SKIP() << "mnist is installed on this machine";
  }
  const std::string text = error_of_opening({.name = "mnist"});
  EXPECT_NE(text.find(folder / "own/mnist"), std::string::npos) << text;
  EXPECT_NE(text.find("scripts/data.sh mnist"), std::string::npos) << text;
}

TEST(Dataset, RejectsDataThatTheModelCannotTake) {
  const Folder folder;
  write_dataset(folder / "d", 3);
  write_bytes(folder / "a.txt", "some text that is long enough");
  const auto expect_rejected = [](const DataOptions& options,
                                  const char* part) {
    const std::string text = error_of_opening(options);
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect_rejected({.name = "mnist", .tokens = true}, "has images");
  expect_rejected(
      {.name = folder / "d/train-images-idx3-ubyte", .tokens = true},
      "has IDX data");
  expect_rejected({.name = folder / "a.txt"}, "expected IDX images");
  expect_rejected({.name = folder / "a.txt", .tokens = true, .classify = true},
                  "choose random");
  expect_rejected({.name = folder / "d"}, "is a directory");
  expect_rejected({.name = "minst"}, "no such file");
  expect_rejected({.name = "random"}, "classes above 0");
  expect_rejected({.name = "random", .tokens = true, .seq = 4},
                  "vocab above 0");
}

TEST(Dataset, RandomImagesDependOnlyOnSeedSplitAndIndex) {
  DataOptions options{.name = "random", .classes = 10, .channels = 3};
  options.random_side = 5;
  const auto data = open_dataset(options);
  EXPECT_EQ(data->size(), 512);
  const auto all = data->get({0, 1, 2, 3});
  EXPECT_EQ(all.tensors[0].sizes(), (std::vector<int64_t>{4, 3, 5, 5}));
  EXPECT_EQ(all.tensors[0].scalar_type(), torch::kUInt8);
  const auto one = open_dataset(options)->get({2});
  EXPECT_TRUE(same(one.tensors[0][0], all.tensors[0][2]));
  EXPECT_TRUE(same(one.tensors[1][0], all.tensors[1][2]));
  EXPECT_FALSE(same(all.tensors[0][0], all.tensors[0][1]));

  options.split = Split::kTest;
  EXPECT_FALSE(
      same(open_dataset(options)->get({2}).tensors[0], one.tensors[0]));
  options.split = Split::kTrain;
  options.seed = 2;
  EXPECT_FALSE(
      same(open_dataset(options)->get({2}).tensors[0], one.tensors[0]));
}

TEST(Dataset, RandomImagesAreUniform) {
  const auto data =
      open_dataset({.name = "random", .classes = 10, .random_samples = 2000});
  std::vector<int64_t> indices(2000);
  std::iota(indices.begin(), indices.end(), 0);
  const auto batch = data->get(indices);
  const auto pixels = batch.tensors[0].to(torch::kDouble).div(255);
  EXPECT_NEAR(pixels.mean().item<double>(), data->mean(), 1e-3);
  EXPECT_NEAR(pixels.std(false).item<double>(), data->stddev(), 1e-3);
  const auto seen = torch::bincount(batch.tensors[1], {}, 10);
  EXPECT_EQ(seen.size(0), 10);
  EXPECT_GT(seen.min().item<int64_t>(), 140);
  EXPECT_LT(seen.max().item<int64_t>(), 260);
}

TEST(Dataset, RandomTokensAreUniformAndReproducible) {
  DataOptions options{
      .name = "random", .tokens = true, .seq = 50, .vocab = 7, .classes = 2};
  const auto language = open_dataset(options);
  EXPECT_EQ(language->count(0), 50);
  auto batch = language->get({3, 9});
  EXPECT_EQ(batch.count, 100);
  EXPECT_TRUE(
      same(batch.tensors[0].slice(1, 1), batch.tensors[1].slice(1, 0, 49)));
  EXPECT_EQ(batch.tensors[0].min().item<int64_t>(), 0);
  EXPECT_EQ(batch.tensors[0].max().item<int64_t>(), 6);

  options.classify = true;
  const auto classified = open_dataset(options);
  EXPECT_EQ(classified->count(0), 1);
  batch = classified->get({3, 9});
  EXPECT_EQ(batch.count, 2);
  EXPECT_EQ(batch.tensors[0].sizes(), (std::vector<int64_t>{2, 50}));
  EXPECT_EQ(batch.tensors[1].sizes(), (std::vector<int64_t>{2}));
  EXPECT_TRUE(same(classified->get({9}).tensors[0][0], batch.tensors[0][1]));
}

TEST(Dataset, FingerprintsTellDataApart) {
  const Folder folder;
  const auto of_text = [&](const std::string& text) {
    write_bytes(folder / "text", text);
    return open_dataset({.name = folder / "text", .tokens = true, .seq = 4})
        ->fingerprint();
  };
  const std::string text(3000, 'a');
  const std::string before = of_text(text);
  EXPECT_FALSE(before.empty());
  EXPECT_EQ(of_text(text), before);
  EXPECT_NE(of_text(text + "aaaaaaaa"), before);
  for (const size_t at : {size_t{0}, size_t{5}}) {
    std::string changed = text;
    changed[at] = 'b';
    EXPECT_NE(of_text(changed), before) << at;
  }
  DataOptions random{.name = "random", .classes = 3, .random_samples = 1000};
  const auto some = open_dataset(random);
  const auto ordered = reprise::with_order(some, [](int64_t, uint64_t) {
    return std::vector<int64_t>{3, 1};
  });
  EXPECT_EQ(ordered->fingerprint(), some->fingerprint());
  random.seed = 2;
  EXPECT_NE(open_dataset(random)->fingerprint(), some->fingerprint());
  write_dataset(folder / "images", 5);
  const std::string path = folder / "images/train-images-idx3-ubyte";
  const auto of_images = [&] {
    return open_dataset({.name = path})->fingerprint();
  };
  const std::string images = of_images();
  write_bytes(folder / "images/train-labels-idx1-ubyte",
              idx_bytes({5}, std::string(5, '\1')));
  EXPECT_NE(of_images(), images);
}

}  // namespace
