#include "train/store/tensorboard.h"

#include "support.h"
#include "temporary.h"

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <unistd.h>

namespace reprise {
namespace {

namespace fs = std::filesystem;
using testing::error_of;

/// Computes the CRC bit by bit from its definition; the writer uses a table.
uint32_t crc32c(const std::string& data) {
  uint32_t crc = 0xFFFFFFFF;
  for (const char c : data) {
    for (int bit = 0; bit < 8; ++bit) {
      const bool one = ((crc ^ (static_cast<uint8_t>(c) >> bit)) & 1) != 0;
      crc >>= 1;
      if (one) crc ^= 0x82F63B78;
    }
  }
  return crc ^ 0xFFFFFFFF;
}

uint32_t masked_crc(const std::string& data) {
  const uint32_t crc = crc32c(data);
  return ((crc >> 15) | (crc << 17)) + 0xA282EAD8;
}

template <typename T>
T take(const std::string& bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(value));
  return value;
}

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

/// Returns the data of each record. Checks lengths and both CRCs.
std::vector<std::string> records(const std::string& bytes) {
  std::vector<std::string> result;
  size_t at = 0;
  while (at < bytes.size()) {
    const auto size = take<uint64_t>(bytes, at);
    EXPECT_EQ(take<uint32_t>(bytes, at + 8), masked_crc(bytes.substr(at, 8)));
    if (at + 16 + size > bytes.size()) {
      ADD_FAILURE() << "a record ends past the file";
      break;
    }
    result.push_back(bytes.substr(at + 12, size));
    EXPECT_EQ(take<uint32_t>(bytes, at + 12 + size), masked_crc(result.back()));
    at += 16 + size;
  }
  return result;
}

/// Returns an event without its first field, the time.
std::string without_time(const std::string& event) {
  EXPECT_EQ(event[0], '\x09');
  const double now = std::chrono::duration<double>(
                         std::chrono::system_clock::now().time_since_epoch())
                         .count();
  EXPECT_NEAR(take<double>(event, 1), now, 60);
  return event.substr(9);
}

std::string bytes(std::initializer_list<int> values) {
  return {values.begin(), values.end()};
}

TEST(Tensorboard, ReferenceCrcMatchesKnownValues) {
  // Values of RFC 3720, appendix B.4, and the check value of CRC-32C.
  EXPECT_EQ(crc32c("123456789"), 0xE3069283);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AA);
  EXPECT_EQ(crc32c(std::string(32, '\xFF')), 0x62A8AB43);
}

TEST(Tensorboard, WritesExpectedBytes) {
  const testing::TemporaryDirectory folder;
  EventWriter writer(folder.path());
  writer.scalar("train/loss", 0.15625, 300);
  writer.scalar("x", -2, 0);
  const auto found = records(contents(writer.path()));
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(without_time(found[0]), bytes({0x1A, 13}) + "brain.Event:2");
  EXPECT_EQ(without_time(found[1]), bytes({0x10, 0xAC, 0x02,  // step = 300
                                           0x2A, 19,          // summary
                                           0x0A, 17,          // its value
                                           0x0A, 10}) +
                                        "train/loss" +
                                        bytes({0x15, 0x00, 0x00, 0x20, 0x3E}));
  EXPECT_EQ(without_time(found[2]),
            bytes({0x10, 0x00, 0x2A, 10, 0x0A, 8, 0x0A, 1}) + "x" +
                bytes({0x15, 0x00, 0x00, 0x00, 0xC0}));
}

TEST(Tensorboard, WritesLongTagsAndLargeSteps) {
  const testing::TemporaryDirectory folder;
  EventWriter writer(folder.path());
  const std::string tag(300, 't');
  writer.scalar(tag, 1, int64_t{1} << 40);
  const auto found = records(contents(writer.path()));
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(without_time(found[1]),
            bytes({0x10, 0x80, 0x80, 0x80, 0x80, 0x80, 0x20,  // 2^40
                   0x2A, 0xB7, 0x02,                          // 311
                   0x0A, 0xB4, 0x02,                          // 308
                   0x0A, 0xAC, 0x02}) +                       // 300
                tag +
                bytes({0x15, 0x00, 0x00, 0x80, 0x3F}));
}

TEST(Tensorboard, CreatesANewFileEachTime) {
  const testing::TemporaryDirectory folder;
  const auto directory = folder / "a/b";
  EventWriter first(directory);
  EventWriter second(directory);
  EXPECT_NE(first.path(), second.path());
  for (const auto* writer : {&first, &second}) {
    const fs::path path(writer->path());
    EXPECT_EQ(path.parent_path(), directory);
    EXPECT_TRUE(std::regex_match(
        path.filename().string(),
        std::regex("events\\.out\\.tfevents\\.\\d{10}\\..+\\.\\d+\\.\\d+")))
        << path;
  }
}

TEST(Tensorboard, ErrorNamesThePath) {
  const testing::TemporaryDirectory folder;
  std::ofstream(folder / "file") << "x";
  const auto error = error_of([&] { EventWriter(folder / "file/logs"); });
  EXPECT_NE(error.find("[EventWriter] expected to make the directory"),
            std::string::npos)
      << error;
}

}  // namespace
}  // namespace reprise
