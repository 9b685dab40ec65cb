#include "train/store/tensorboard.h"

#include "base/append_log.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <filesystem>
#include <string_view>
#include <unistd.h>

// An event file is a sequence of TFRecords: length (8 bytes), masked CRC-32C of
// the length, data, masked CRC-32C of the data; all little-endian. The data is
// an Event in the protocol buffer wire format, of which four fields are used:
//
//     Event   { double wall_time = 1; int64 step = 2;
//               string file_version = 3; Summary summary = 5; }
//     Summary { repeated Value value = 1; }
//     Value   { string tag = 1; float simple_value = 2; }

namespace reprise {
namespace {

/// Table for the reflected CRC-32C (Castagnoli), one byte at a time.
constexpr std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0u);
    }
    table[byte] = crc;
  }
  return table;
}

uint32_t crc32c(std::string_view data) {
  static constexpr auto kTable = crc_table();
  uint32_t crc = ~uint32_t{0};
  for (const char c : data) {
    crc = kTable[(crc ^ static_cast<unsigned char>(c)) & 0xFF] ^ (crc >> 8);
  }
  return ~crc;
}

/// TFRecord stores CRCs rotated and offset, because the CRC of data that
/// contains its own CRC is weak.
uint32_t masked(uint32_t crc) {
  return std::rotr(crc, 15) + 0xA282EAD8u;
}

template <typename Unsigned>
std::string little_endian(Unsigned value) {
  std::string bytes;
  for (size_t i = 0; i < sizeof(value); ++i) {
    bytes.push_back(static_cast<char>(value >> (8 * i) & 0xFF));
  }
  return bytes;
}

/// Returns `data` as a TFRecord.
std::string record(std::string_view data) {
  const std::string length = little_endian(uint64_t{data.size()});
  return length + little_endian(masked(crc32c(length))) + std::string(data) +
         little_endian(masked(crc32c(data)));
}

enum WireType { kVarint = 0, k64Bits = 1, kBytes = 2, k32Bits = 5 };

std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) {
    bytes.push_back(static_cast<char>(value | 0x80));
  }
  bytes.push_back(static_cast<char>(value));
  return bytes;
}

std::string key(int field, WireType type) {
  return varint(static_cast<uint64_t>(field) << 3 | type);
}

std::string bytes_field(int field, std::string_view bytes) {
  return key(field, kBytes) + varint(bytes.size()) + std::string(bytes);
}

/// Returns the first field of an Event, its time.
std::string event_now() {
  const double seconds =
      std::chrono::duration<double>(
          std::chrono::system_clock::now().time_since_epoch())
          .count();
  return key(1, k64Bits) + little_endian(std::bit_cast<uint64_t>(seconds));
}

/// Returns a file name that no other writer uses.
std::string new_path(const std::string& directory) {
  static std::atomic<int> number{0};
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) != 0) host = {"localhost"};
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(
                           std::chrono::system_clock::now().time_since_epoch())
                           .count();
  return (std::filesystem::path(directory) /
          fmt::format("events.out.tfevents.{:010}.{}.{}.{}", seconds,
                      host.data(), getpid(), number++))
      .string();
}

}  // namespace

EventWriter::EventWriter(const std::string& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  TORCH_CHECK(!error, "[EventWriter] expected to make the directory ",
              directory, ", got ", error.message());
  log_ = std::make_unique<detail::AppendLog>(
      new_path(directory), "EventWriter", detail::AppendLog::Mode::kCreateNew);
  log_->append(record(event_now() + bytes_field(3, "brain.Event:2")));
}

EventWriter::~EventWriter() = default;

void EventWriter::scalar(const std::string& tag, double value, int64_t step) {
  const auto number = std::bit_cast<uint32_t>(static_cast<float>(value));
  const std::string entry =
      bytes_field(1, tag) + key(2, k32Bits) + little_endian(number);
  log_->append(record(event_now() + key(2, kVarint) +
                      varint(static_cast<uint64_t>(step)) +
                      bytes_field(5, bytes_field(1, entry))));
}

const std::string& EventWriter::path() const {
  return log_->path();
}

}  // namespace reprise
