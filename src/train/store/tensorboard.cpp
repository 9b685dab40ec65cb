#include "train/store/tensorboard.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <string_view>
#include <unistd.h>

// A file is a sequence of records, TFRecord: length (8 bytes), masked CRC-32C of
// these, data, masked CRC-32C of the data; all little-endian. The data is an
// Event in the wire format of protocol buffers, of which four fields are used:
//
//     Event   { double wall_time = 1; int64 step = 2;
//               string file_version = 3; Summary summary = 5; }
//     Summary { repeated Value value = 1; }
//     Value   { string tag = 1; float simple_value = 2; }

namespace reprise {
namespace {

/// CRC-32C (Castagnoli), reflected, by the byte.
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

/// The CRC of data that holds CRCs would be weak; so TFRecord stores it turned
/// and moved.
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

std::string event_now() {
  const double seconds =
      std::chrono::duration<double>(
          std::chrono::system_clock::now().time_since_epoch())
          .count();
  return key(1, k64Bits) + little_endian(std::bit_cast<uint64_t>(seconds));
}

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

struct EventWriter::Impl {
  std::string path;
  int file = -1;

  void write(const std::string& data) const {
    // One call a record, so that a reader or a kill seldom meets half of one.
    const std::string bytes = record(data);
    size_t done = 0;
    while (done < bytes.size()) {
      const auto count =
          ::write(file, bytes.data() + done, bytes.size() - done);
      if (count < 0 && errno == EINTR) continue;
      TORCH_CHECK(count > 0, "[EventWriter] expected to write ", path, ", got ",
                  std::strerror(errno));
      done += static_cast<size_t>(count);
    }
  }

  ~Impl() {
    if (file >= 0) ::close(file);
  }
};

EventWriter::EventWriter(const std::string& directory)
    : impl_(std::make_unique<Impl>()) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  TORCH_CHECK(!error, "[EventWriter] expected to make the directory ",
              directory, ", got ", error.message());
  impl_->path = new_path(directory);
  impl_->file =
      ::open(impl_->path.c_str(),
             O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644);
  TORCH_CHECK(impl_->file >= 0, "[EventWriter] expected to open ", impl_->path,
              ", got ", std::strerror(errno));
  impl_->write(event_now() + bytes_field(3, "brain.Event:2"));
}

EventWriter::~EventWriter() = default;

void EventWriter::scalar(const std::string& tag, double value, int64_t step) {
  const auto number = std::bit_cast<uint32_t>(static_cast<float>(value));
  const std::string entry =
      bytes_field(1, tag) + key(2, k32Bits) + little_endian(number);
  impl_->write(event_now() + key(2, kVarint) +
               varint(static_cast<uint64_t>(step)) +
               bytes_field(5, bytes_field(1, entry)));
}

const std::string& EventWriter::path() const {
  return impl_->path;
}

}  // namespace reprise
