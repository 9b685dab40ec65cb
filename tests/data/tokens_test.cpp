#include "files.h"
#include "support.h"

#include <reprise/data/dataset.h>

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

namespace {

using namespace reprise::testing;
using reprise::DataOptions;
using reprise::open_dataset;
using reprise::Split;

std::string uint16_bytes(const std::vector<uint16_t>& tokens) {
  return {reinterpret_cast<const char*>(tokens.data()), 2 * tokens.size()};
}

std::string llmc_header(int32_t version, int32_t tokens) {
  std::vector<int32_t> header(256);
  header[0] = 20240520;
  header[1] = version;
  header[2] = tokens;
  return {reinterpret_cast<const char*>(header.data()), 4 * header.size()};
}

/// 0, 1, 2, …
std::vector<uint16_t> ramp(int count) {
  std::vector<uint16_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), uint16_t{0});
  return tokens;
}

TEST(Tokens, TextBytesAreTokensAndTargetsAreShiftedByOne) {
  const Folder folder;
  write_bytes(folder / "a.txt", "abcdefgh\xff");
  const auto data = open_dataset({.name = folder / "a.txt",
                                  .tokens = true,
                                  .seq = 3,
                                  .vocab = 256,
                                  .test_fraction = 0});
  EXPECT_EQ(data->size(), 2);
  EXPECT_EQ(data->count(0), 3);
  const auto batch = data->get({1, 0});
  EXPECT_EQ(batch.samples, 2);
  EXPECT_EQ(batch.count, 6);
  EXPECT_TRUE(
      same(batch.tensors[0],
           torch::tensor({{'d', 'e', 'f'}, {'a', 'b', 'c'}}, torch::kLong)));
  EXPECT_TRUE(
      same(batch.tensors[1],
           torch::tensor({{'e', 'f', 'g'}, {'b', 'c', 'd'}}, torch::kLong)));
  EXPECT_EQ(data->description(), "a.txt, 2 samples of 3 bytes");
}

TEST(Tokens, HighBytesAreNotNegative) {
  const Folder folder;
  write_bytes(folder / "a.txt", "\xff\xfe\x80");
  const auto data = open_dataset(
      {.name = folder / "a.txt", .tokens = true, .seq = 2, .test_fraction = 0});
  EXPECT_TRUE(same(data->get({0}).tensors[0],
                   torch::tensor({{255, 254}}, torch::kLong)));
}

TEST(Tokens, TestSplitIsTheEndOfTheFile) {
  const Folder folder;
  write_bytes(folder / "a.bin", uint16_bytes(ramp(100)));
  DataOptions options{.name = folder / "a.bin",
                      .split = Split::kTest,
                      .tokens = true,
                      .seq = 9,
                      .test_fraction = 0.2};
  const auto test = open_dataset(options);
  EXPECT_EQ(test->size(), 2);
  EXPECT_EQ(test->get({0}).tensors[0].min().item<int64_t>(), 80);
  EXPECT_EQ(test->get({1}).tensors[1].max().item<int64_t>(), 98);
  options.split = Split::kTrain;
  const auto train = open_dataset(options);
  EXPECT_EQ(train->size(), 8);
  // No training target lies in the test part.
  EXPECT_LT(train->get({7}).tensors[1].max().item<int64_t>(), 80);
}

TEST(Tokens, SkipsTheHeaderOfLlmc) {
  const Folder folder;
  write_bytes(folder / "plain.bin", uint16_bytes(ramp(600)));
  write_bytes(folder / "llmc.bin",
              llmc_header(1, 600) + uint16_bytes(ramp(600)));
  for (const std::string name : {"plain.bin", "llmc.bin"}) {
    const auto data = open_dataset({.name = folder / name,
                                    .tokens = true,
                                    .seq = 10,
                                    .vocab = 600,
                                    .test_fraction = 0});
    EXPECT_EQ(data->size(), 59) << name;
    EXPECT_TRUE(same(data->get({58}).tensors[1][0],
                     torch::arange(581, 591, torch::kLong)))
        << name;
  }
}

TEST(Tokens, ReportsInvalidFiles) {
  const Folder folder;
  const auto error = [&](const std::string& name, const std::string& bytes,
                         DataOptions options) {
    write_bytes(folder / name, bytes);
    options.name = folder / name;
    options.tokens = true;
    const std::string text = error_of_opening(options);
    EXPECT_NE(text.find(folder / name), std::string::npos) << text;
    return text;
  };
  const auto has = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  };
  const auto tokens = uint16_bytes(ramp(600));
  std::string text = error("a.bin", tokens + "x", {.seq = 4});
  EXPECT_TRUE(has(text, "odd size of 1201 bytes")) << text;
  text = error("a.bin", tokens, {.seq = 4, .vocab = 500});
  EXPECT_TRUE(has(text, "vocabulary of 500, found 599 at 599")) << text;
  text = error("a.txt", "abz", {.seq = 1, .vocab = 100, .test_fraction = 0});
  EXPECT_TRUE(has(text, "vocabulary of 100, found 122 at 2")) << text;
  text = error("a.bin", llmc_header(2, 600) + tokens, {.seq = 4});
  EXPECT_TRUE(has(text, "expected version 1")) << text;
  text = error("a.bin", llmc_header(1, 601) + tokens, {.seq = 4});
  EXPECT_TRUE(has(text, "expected 601 tokens")) << text;
  EXPECT_TRUE(has(text, "found 1200 bytes")) << text;
  text = error("a.txt", "abcd", {.seq = 4, .test_fraction = 0});
  EXPECT_TRUE(has(text, "at least 5 tokens")) << text;
  EXPECT_TRUE(has(text, "found 4")) << text;
  text = error("a.txt", "", {.seq = 4});
  EXPECT_TRUE(has(text, "found 0")) << text;
  text = error("a.txt", "abcdef",
               {.split = Split::kTest, .seq = 4, .test_fraction = 0.5});
  EXPECT_TRUE(has(text, "found 3 in the test part of 6")) << text;
}

TEST(Tokens, RejectsInvalidOptions) {
  const Folder folder;
  write_bytes(folder / "a.txt", "some text");
  EXPECT_NE(error_of_opening({.name = folder / "a.txt", .tokens = true})
                .find("seq above 0, got 0"),
            std::string::npos);
  EXPECT_NE(error_of_opening({.name = folder / "a.txt",
                              .tokens = true,
                              .seq = 1,
                              .test_fraction = 1})
                .find("test_fraction"),
            std::string::npos);
}

}  // namespace
