#include "files.h"
#include "support.h"

#include <reprise/data/dataset.h>

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <sys/stat.h>

namespace {

using namespace reprise::testing;
using reprise::DataOptions;
using reprise::open_dataset;
using reprise::Split;

std::string uint16_bytes(const std::vector<uint16_t>& tokens) {
  return {reinterpret_cast<const char*>(tokens.data()), 2 * tokens.size()};
}

std::string uint32_bytes(const std::vector<uint32_t>& tokens) {
  return {reinterpret_cast<const char*>(tokens.data()), 4 * tokens.size()};
}

std::string llmc_header(int32_t version, int32_t tokens,
                        int32_t magic = 20240520) {
  std::vector<int32_t> header(256);
  header[0] = magic;
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

// The header that llm.c writes for Llama 3.
std::string llama3_header(int32_t version, int32_t tokens) {
  return llmc_header(version, tokens, 20240801);
}

/// 0, 1000, 2000, …: more than 16 bits.
std::vector<uint32_t> wide_ramp(int count) {
  std::vector<uint32_t> tokens;
  for (int i = 0; i < count; ++i) {
    tokens.push_back(1000 * static_cast<uint32_t>(i));
  }
  return tokens;
}

TEST(Tokens, ReadsTokensOf32Bits) {
  const Folder folder;
  const std::string tokens = uint32_bytes(wide_ramp(150));
  write_bytes(folder / "plain.u32", tokens);
  write_bytes(folder / "plain.bin32", tokens);
  write_bytes(folder / "llmc.bin", llama3_header(7, 150) + tokens);
  write_bytes(folder / "llmc.u32", llama3_header(7, 150) + tokens);
  for (const std::string name :
       {"plain.u32", "plain.bin32", "llmc.bin", "llmc.u32"}) {
    const auto data = open_dataset({.name = folder / name,
                                    .tokens = true,
                                    .seq = 10,
                                    .vocab = 149'001,
                                    .test_fraction = 0});
    EXPECT_EQ(data->size(), 14) << name;
    const auto batch = data->get({13});
    EXPECT_TRUE(
        same(batch.tensors[0][0], 1000 * torch::arange(130, 140, torch::kLong)))
        << name;
    EXPECT_TRUE(
        same(batch.tensors[1][0], 1000 * torch::arange(131, 141, torch::kLong)))
        << name;
    EXPECT_EQ(data->description(), name + ", 14 samples of 10 tokens");
  }
  // The header of 16-bit tokens takes precedence over the name.
  write_bytes(folder / "narrow.u32",
              llmc_header(1, 600) + uint16_bytes(ramp(600)));
  const auto data = open_dataset({.name = folder / "narrow.u32",
                                  .tokens = true,
                                  .seq = 10,
                                  .test_fraction = 0});
  EXPECT_EQ(data->size(), 59);
}

TEST(Tokens, LargeTokensAreNotNegative) {
  const Folder folder;
  write_bytes(folder / "a.u32", uint32_bytes({4294967295u, 2147483648u, 1u}));
  const auto data = open_dataset(
      {.name = folder / "a.u32", .tokens = true, .seq = 2, .test_fraction = 0});
  EXPECT_TRUE(same(data->get({0}).tensors[0],
                   torch::tensor({{4294967295, 2147483648}}, torch::kLong)));
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
  const auto wide = uint32_bytes(wide_ramp(150));
  for (const char* name : {"a.u32", "a.bin32"}) {
    text = error(name, wide + "xy", {.seq = 4});
    EXPECT_TRUE(has(text, "tokens of 4 bytes, found a size of 602 bytes"))
        << text;
    text = error(name, wide, {.seq = 4, .vocab = 149'000});
    EXPECT_TRUE(has(text, "vocabulary of 149000, found 149000 at 149")) << text;
  }
  text = error("a.bin", llama3_header(1, 150) + wide, {.seq = 4});
  EXPECT_TRUE(has(text, "expected version 7")) << text;
  text = error("a.bin", llama3_header(7, 151) + wide, {.seq = 4});
  EXPECT_TRUE(has(text, "expected 151 tokens of 4 bytes")) << text;
  EXPECT_TRUE(has(text, "found 600 bytes")) << text;
  text = error("a.bin", llama3_header(7, 150) + wide,
               {.seq = 4, .vocab = 100'000});
  EXPECT_TRUE(has(text, "vocabulary of 100000, found 149000 at 149")) << text;
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

TEST(Tokens, FilesThatBecomeShorterAreErrors) {
  const Folder folder;
  const std::string path = folder / "a.bin";
  write_bytes(path, uint16_bytes(ramp(20'000)));
  const auto data = open_dataset(
      {.name = path, .tokens = true, .seq = 9, .test_fraction = 0});
  DataOptions whole{.name = path,
                    .tokens = true,
                    .seq = 9,
                    .test_fraction = 0,
                    .documents = reprise::DocumentMode::kPadded,
                    .document_end = 10};
  const auto documents = open_dataset(whole);
  std::filesystem::resize_file(path, 100);
  for (const auto& one : {data, documents}) {
    EXPECT_EQ(one->get({0}).samples, 1);
    const std::string text = error_of([&] { one->get({one->size() - 1}); });
    EXPECT_NE(text.find(path), std::string::npos) << text;
    EXPECT_NE(text.find("it ends after 100 bytes"), std::string::npos) << text;
  }
}

TEST(Tokens, RefusesWhatIsNoFile) {
  const Folder folder;
  ASSERT_EQ(mkfifo((folder / "a.bin").c_str(), 0600), 0);
  for (const std::string& path : {folder / "a.bin", std::string("/dev/zero")}) {
    const std::string text =
        error_of_opening({.name = path, .tokens = true, .seq = 9});
    EXPECT_NE(text.find("expected a file, " + path), std::string::npos) << text;
  }
}

}  // namespace
