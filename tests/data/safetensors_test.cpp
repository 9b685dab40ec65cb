#include "base/file.h"
#include "support.h"

#include <reprise/data/safetensors.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sys/stat.h>

namespace reprise {
namespace {

using testing::error_of;
using testing::on_device;
using testing::same;

/// A path in the temporary directory, removed by the destructor.
class TemporaryPath {
 public:
  TemporaryPath()
      : path_(::testing::TempDir() + "reprise_" +
              ::testing::UnitTest::GetInstance()->current_test_info()->name() +
              ".safetensors") {}
  ~TemporaryPath() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  const std::string& get() const { return path_; }

 private:
  std::string path_;
};

/// Writes a file byte by byte, following the format's specification.
void write_raw(const std::string& path, const std::string& header,
               const std::string& data) {
  std::ofstream file(path, std::ios::binary);
  for (size_t i = 0; i < 8; ++i) {
    file.put(static_cast<char>((header.size() >> (8 * i)) & 0xff));
  }
  file << header << data;
}

/// The error of opening such a file and reading "a".
std::string read_error(const std::string& header, const std::string& data) {
  const TemporaryPath path;
  write_raw(path.get(), header, data);
  const std::string text = error_of([&] { SafeTensors(path.get()).read("a"); });
  EXPECT_NE(text.find(path.get()), std::string::npos) << text;
  return text;
}

void expect_in(const std::string& part, const std::string& text) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(Safetensors, RoundTripsAllTypes) {
  const TemporaryPath path;
  NamedTensors written;
  for (const auto type :
       {torch::kDouble, torch::kFloat, torch::kHalf, torch::kBFloat16,
        torch::kLong, torch::kInt, torch::kShort, torch::kChar, torch::kByte,
        torch::kBool}) {
    written.emplace_back(
        std::string("t.") + c10::toString(type),
        (torch::rand({3, 5}, on_device()) * 100).sub(1).relu().to(type));
  }
  written.emplace_back("a scalar", torch::tensor(3.5));
  written.emplace_back("empty", torch::empty({0, 4}));
  written.emplace_back("transposed", torch::rand({4, 3}).t());
  written.emplace_back("names \"quoted\" é", torch::rand({1}));
  write_safetensors(path.get(), written, {{"format", "pt"}, {"x", "1"}});

  const SafeTensors file(path.get());
  EXPECT_EQ(file.path(), path.get());
  ASSERT_EQ(file.entries().size(), written.size());
  for (const auto& [name, tensor] : written) {
    EXPECT_TRUE(same(file.read(name), tensor)) << name;
    const auto& entry = file.entries().at(name);
    EXPECT_EQ(entry.begin % tensor.element_size(), 0u) << name;
  }
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.metadata().size(), 2u);
}

TEST(Safetensors, ReadsAFileWrittenByHand) {
  const TemporaryPath path;
  const float floats[] = {1.5f, -2.f};
  std::string data(reinterpret_cast<const char*>(floats), sizeof floats);
  data += std::string("\x01\x00\x07", 3);
  write_raw(path.get(),
            R"({"b":{"dtype":"BOOL","shape":[3],"data_offsets":[8,11]},)"
            R"("a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}}    )",
            data);
  const SafeTensors file(path.get());
  EXPECT_TRUE(same(file.read("a"), torch::tensor({1.5f, -2.f}).view({2, 1})));
  EXPECT_TRUE(same(file.read("b"), torch::tensor({true, false, true})));
  EXPECT_TRUE(file.metadata().empty());
  expect_in("no tensor 'c'", error_of([&] { file.read("c"); }));
}

TEST(Safetensors, RejectsTruncatedFiles) {
  const TemporaryPath path;
  write_safetensors(path.get(), {{"a", torch::ones({4})}});
  const auto whole = std::filesystem::file_size(path.get());
  for (auto size = whole; size-- > 0;) {
    std::filesystem::resize_file(path.get(), size);
    expect_in("truncated", error_of([&] { SafeTensors{path.get()}; }));
  }
  const TemporaryPath missing;
  std::filesystem::remove(missing.get());
  expect_in("cannot read", error_of([&] { SafeTensors{missing.get()}; }));
}

TEST(Safetensors, RejectsInvalidHeaders) {
  expect_in("JSON object", read_error("{\"a\":", ""));
  expect_in("JSON object", read_error("[1, 2]", ""));
  expect_in("expected dtype, shape", read_error(R"({"a":{}})", ""));
  expect_in("expected dtype, shape",
            read_error(R"({"a":{"dtype":"F32","shape":[-1],)"
                       R"("data_offsets":[0,4]}})",
                       "abcd"));
  expect_in(
      "has type 'F7'",
      read_error(R"({"a":{"dtype":"F7","shape":[],"data_offsets":[0,4]}})",
                 "abcd"));
  expect_in("metadata", read_error(R"({"__metadata__":{"a":1}})", ""));
  expect_in(
      "occurs twice",
      read_error(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                 R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                 "ab"));
  const TemporaryPath path;
  std::ofstream(path.get(), std::ios::binary) << "PK\x03\x04 a zip file";
  expect_in("not in this format", error_of([&] { SafeTensors{path.get()}; }));
}

TEST(Safetensors, NestingHasALimitAndMessagesAreShort) {
  const std::string deep =
      std::string(120'000, '[') + std::string(120'000, ']');
  expect_in("nested more than 64 deep",
            read_error(R"({"a":{"dtype":)" + deep + "}}", ""));
  const std::string shallow = std::string(30, '[') + std::string(30, ']');
  const std::string text =
      read_error(R"({"a":{"dtype":)" + shallow + R"(,"x":")" +
                     std::string(9999, 'x') + R"("}})",
                 "");
  expect_in("expected dtype, shape", text);
  EXPECT_LT(text.size(), 1000u);
  const std::string name(5000, 'n');
  EXPECT_LT(read_error("{\"" + name + R"(":{}})", "").size(), 1000u);
}

TEST(Safetensors, RejectsSizesThatOverflow) {
  const auto one = [](const char* shape) {
    return read_error(R"({"a":{"dtype":"F32","shape":)" + std::string(shape) +
                          R"(,"data_offsets":[0,0]}})",
                      "");
  };
  expect_in("does not fit its 0 bytes", one("[4611686018427387904,4]"));
  expect_in("does not fit its 0 bytes", one("[4294967296,4294967296]"));
  expect_in("does not fit its 0 bytes",
            one("[0,9223372036854775807,9223372036854775807]"));
  expect_in("expected dtype, shape", one("[18446744073709551615]"));
}

TEST(Safetensors, RefusesWhatIsNoFile) {
  const TemporaryPath path;
  std::filesystem::remove(path.get());
  ASSERT_EQ(mkfifo(path.get().c_str(), 0600), 0);
  expect_in("a named pipe", error_of([&] { SafeTensors{path.get()}; }));
  expect_in("a device", error_of([] { SafeTensors{"/dev/zero"}; }));
}

TEST(Safetensors, RejectsInconsistentOffsets) {
  const auto one = [](const std::string& shape, const std::string& offsets) {
    return R"({"a":{"dtype":"F32","shape":)" + shape + R"(,"data_offsets":)" +
           offsets + "}}";
  };
  expect_in("tensor 'a' has shape [3] of F32, which does not fit its 8 bytes",
            read_error(one("[3]", "[0,8]"), std::string(8, 'x')));
  expect_in("does not fit",  // 2⁶⁴ bytes
            read_error(one("[4294967296,1073741824]", "[0,0]"), ""));
  expect_in("before it begins", read_error(one("[1]", "[4,0]"), "abcd"));
  expect_in("bytes 0 to 4, before tensor 'a', belong to no tensor",
            read_error(one("[1]", "[4,8]"), "abcdabcd"));
  expect_in("the last 4 bytes belong to no tensor",
            read_error(one("[1]", "[0,4]"), "abcdabcd"));
  expect_in(
      "tensor 'b' begins at byte 2, inside the tensor before it",
      read_error(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                 R"("b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
                 "abcdef"));
}

TEST(Safetensors, RejectsUnsupportedTensorsAndNames) {
  const TemporaryPath path;
  write_safetensors(path.get(), {{"a", torch::ones({1})}});
  const auto one = torch::ones({1});
  expect_in("'a' twice", error_of([&] {
              write_safetensors(path.get(), {{"a", one}, {"a", one}});
            }));
  expect_in(
      "which the format does not support", error_of([&] {
        write_safetensors(path.get(), {{"c", one.to(torch::kComplexFloat)}});
      }));
  expect_in("UTF-8", error_of([&] {
              write_safetensors(path.get(), {{"\xff", one}});
            }));
  // The existing file is unchanged.
  EXPECT_TRUE(same(SafeTensors(path.get()).read("a"), one));
}

/// Reads all tensors of the file with these bytes; false if any part of it is refused.
bool reads(const std::string& path, const std::string& bytes,
           NamedTensors& tensors) {
  std::ofstream(path, std::ios::binary) << bytes;
  tensors.clear();
  try {
    const SafeTensors file(path);
    for (const auto& [name, entry] : file.entries()) {
      tensors.emplace_back(name, file.read(name));
    }
    file.verify();
    return true;
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what_without_backtrace()).find(path),
              std::string::npos);
    return false;
  }
}

/// Every single bit: it is detected, or it is of no consequence, as in the name of the
/// checksums.
TEST(Safetensors, ChecksumsSeeEveryFlippedBit) {
  const TemporaryPath path;
  const NamedTensors written{{"a", torch::rand({5})},
                             {"b", torch::tensor({true, false})},
                             {"empty", torch::empty({0})}};
  write_safetensors(path.get(), written, {{"x", "1"}});
  EXPECT_TRUE(SafeTensors(path.get()).has_checksums());
  EXPECT_EQ(SafeTensors(path.get()).metadata().size(), 1u);
  const std::string whole = read_text(path.get());
  NamedTensors tensors;
  ASSERT_TRUE(reads(path.get(), whole, tensors));
  int harmless = 0;
  for (size_t bit = 0; bit < whole.size() * 8; ++bit) {
    std::string flipped = whole;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    if (!reads(path.get(), flipped, tensors)) continue;
    ++harmless;
    ASSERT_EQ(tensors.size(), written.size()) << bit;
    for (size_t i = 0; i < tensors.size(); ++i) {
      EXPECT_EQ(tensors[i].first, written[i].first);
      EXPECT_TRUE(same(tensors[i].second, written[i].second)) << bit;
    }
  }
  // The name of the checksums has 17 letters.
  EXPECT_LE(harmless, 17 * 8);
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_FALSE(reads(path.get(), whole.substr(0, length), tensors));
  }
}

TEST(Safetensors, ChecksumErrorsNameTheTensor) {
  const TemporaryPath path;
  write_safetensors(path.get(),
                    {{"a", torch::rand({300'000})}, {"b", torch::rand({4})}});
  std::string bytes = read_text(path.get());
  bytes[bytes.size() - 1] ^= 1;  // the last value of b
  std::ofstream(path.get(), std::ios::binary) << bytes;
  const SafeTensors file(path.get());
  EXPECT_NO_THROW(file.read("a"));
  expect_in("tensor 'b' does not fit its checksum",
            error_of([&] { file.read("b"); }));
  expect_in("tensor 'b' does not fit its checksum",
            error_of([&] { file.verify(); }));
  bytes[20] ^= 1;
  std::ofstream(path.get(), std::ios::binary) << bytes;
  error_of([&] { SafeTensors again(path.get()); });
}

/// Files of other programs have none.
TEST(Safetensors, ReadsFilesWithoutChecksums) {
  const TemporaryPath path;
  write_raw(path.get(),
            R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", "xy");
  const SafeTensors file(path.get());
  EXPECT_FALSE(file.has_checksums());
  EXPECT_NO_THROW(file.verify());
  EXPECT_EQ(file.read("a")[1].item<int>(), 'y');
}

}  // namespace
}  // namespace reprise
