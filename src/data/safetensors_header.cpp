// Tested by tests/data/safetensors_test.cpp.
#include "data/safetensors_header.h"

#include "base/json_text.h"
#include "base/text_check.h"
#include "base/throw_error.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

namespace reprise::detail {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little,
              "the format is little-endian");

constexpr uint64_t kLengthBytes = 8;
/// Far more than any tensor has.
constexpr size_t kMostDimensions = 64;

struct TypeSize {
  std::string_view name;
  uint64_t bytes;
};
constexpr std::array<TypeSize, 10> kTypes = {{
    {"F64", 8},
    {"F32", 4},
    {"F16", 2},
    {"BF16", 2},
    {"I64", 8},
    {"I32", 4},
    {"I16", 2},
    {"I8", 1},
    {"U8", 1},
    {"BOOL", 1},
}};

/// Begins all messages.
std::string in_file(const std::string& path) {
  return "[safetensors] " + path + ": ";
}

/// Returns nullopt if the size does not fit in 63 bits. A dimension of 0 does not hide others
/// that are too large: strides are computed of all.
std::optional<uint64_t> byte_count(const std::vector<int64_t>& shape,
                                   uint64_t element_bytes) {
  constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();
  uint64_t bytes = element_bytes;
  bool empty = false;
  for (const int64_t size : shape) {
    const auto factor = static_cast<uint64_t>(std::max<int64_t>(size, 1));
    if (bytes > kMost / factor) return std::nullopt;
    bytes *= factor;
    empty = empty || size == 0;
  }
  return empty ? 0 : bytes;
}

/// Parses the header and rejects duplicate names, which the JSON parser accepts.
json parse_header(const std::string& path, const std::string& text) {
  const std::string limit = why_not_parsed(text);
  if (!limit.empty()) {
    throw_error("{}the header has {}; the file is corrupt", in_file(path),
                limit);
  }
  std::set<std::string> names;
  std::string twice;
  const auto watch = [&](int depth, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::key && depth == 1 &&
        !names.insert(value.get<std::string>()).second) {
      twice = value.get<std::string>();
    }
    return true;
  };
  json header = json::parse(text, watch, /*allow_exceptions=*/false);
  if (!header.is_object()) {
    throw_error(
        "{}expected a header that is a JSON object, got something else; the "
        "file is corrupt or not in this format",
        in_file(path));
  }
  if (!twice.empty()) {
    throw_error("{}tensor {} occurs twice", in_file(path), in_quotes(twice));
  }
  return header;
}

bool all_counts(const json& list, size_t most) {
  return list.is_array() && list.size() <= most &&
         std::all_of(list.begin(), list.end(), [](const json& item) {
           return item.is_number_unsigned() &&
                  item.get<uint64_t>() <=
                      uint64_t{std::numeric_limits<int64_t>::max()};
         });
}

/// `where` begins the messages: file and tensor.
HeaderEntry parse_entry(const std::string& where, const json& value) {
  const bool has_all = value.is_object() && value.contains("dtype") &&
                       value["dtype"].is_string() && value.contains("shape") &&
                       all_counts(value["shape"], kMostDimensions) &&
                       value.contains("data_offsets") &&
                       all_counts(value["data_offsets"], 2) &&
                       value["data_offsets"].size() == 2;
  if (!has_all) {
    throw_error("{} expected dtype, shape and data_offsets, got {}", where,
                shown_json(value));
  }
  HeaderEntry entry{value["dtype"].get<std::string>(),
                    value["shape"].get<std::vector<int64_t>>(),
                    value["data_offsets"][0].get<uint64_t>(),
                    value["data_offsets"][1].get<uint64_t>()};
  const auto type =
      std::find_if(kTypes.begin(), kTypes.end(),
                   [&](const TypeSize& t) { return t.name == entry.type; });
  if (type == kTypes.end()) {
    throw_error(
        "{} has type {}; expected one of F64, F32, F16, BF16, I64, I32, I16, "
        "I8, U8, BOOL",
        where, in_quotes(entry.type));
  }
  if (entry.begin > entry.end) {
    throw_error("{} ends at byte {} before it begins at byte {}", where,
                entry.end, entry.begin);
  }
  const auto expected = byte_count(entry.shape, type->bytes);
  if (!expected || *expected != entry.end - entry.begin) {
    throw_error("{} has shape {} of {}, which does not fit its {} bytes", where,
                json(entry.shape).dump(), entry.type, entry.end - entry.begin);
  }
  return entry;
}

/// Checks that every byte of the data belongs to exactly one tensor.
void check_layout(const std::string& path,
                  const std::map<std::string, HeaderEntry>& entries,
                  uint64_t data_bytes) {
  std::vector<std::pair<const std::string*, const HeaderEntry*>> in_order;
  for (const auto& [name, entry] : entries) in_order.push_back({&name, &entry});
  std::stable_sort(in_order.begin(), in_order.end(),
                   [](const auto& a, const auto& b) {
                     return std::pair(a.second->begin, a.second->end) <
                            std::pair(b.second->begin, b.second->end);
                   });
  uint64_t at = 0;
  for (const auto& [name, entry] : in_order) {
    if (entry->begin < at) {
      throw_error(
          "{}tensor {} begins at byte {}, inside the tensor before it, which "
          "ends at {}",
          in_file(path), in_quotes(*name), entry->begin, at);
    }
    if (entry->begin > at) {
      throw_error("{}bytes {} to {}, before tensor {}, belong to no tensor",
                  in_file(path), at, entry->begin, in_quotes(*name));
    }
    if (entry->end > data_bytes) {
      throw_error("{}tensor {} ends at byte {} of {}; the file is truncated",
                  in_file(path), in_quotes(*name), entry->end, data_bytes);
    }
    at = entry->end;
  }
  if (at != data_bytes) {
    throw_error("{}the last {} bytes belong to no tensor", in_file(path),
                data_bytes - at);
  }
}

std::map<std::string, std::string> parse_metadata(const std::string& path,
                                                  const json& value) {
  if (!value.is_object()) {
    throw_error("{}expected metadata that is a JSON object", in_file(path));
  }
  std::map<std::string, std::string> metadata;
  for (const auto& [key, item] : value.items()) {
    if (!item.is_string()) {
      throw_error("{}expected metadata values that are strings, {} is not",
                  in_file(path), in_quotes(key));
    }
    metadata[key] = item.get<std::string>();
  }
  return metadata;
}

/// The text of the header, after checks of its length.
std::string header_text(const InputFile& file) {
  const std::string& path = file.path();
  if (file.size() < kLengthBytes) {
    throw_error("{}expected at least 8 bytes, got {}; the file is truncated",
                in_file(path), file.size());
  }
  uint64_t bytes = 0;
  file.read(0, &bytes, kLengthBytes);
  if (bytes > kMaxHeaderBytes) {
    throw_error(
        "{}the header claims {} bytes, more than {}; the file is corrupt or "
        "not in this format",
        in_file(path), bytes, kMaxHeaderBytes);
  }
  if (bytes > file.size() - kLengthBytes) {
    throw_error(
        "{}the header claims {} bytes, the file has {}; it is truncated",
        in_file(path), bytes, file.size());
  }
  std::string text(bytes, '\0');
  file.read(kLengthBytes, text.data(), text.size());
  return text;
}

}  // namespace

SafeTensorsHeader read_safetensors_header(const InputFile& file) {
  SafeTensorsHeader header;
  header.text = header_text(file);
  header.data_begin = kLengthBytes + header.text.size();
  const json parsed = parse_header(file.path(), header.text);
  for (const auto& [name, value] : parsed.items()) {
    if (name == kMetadataKey) {
      header.metadata = parse_metadata(file.path(), value);
      continue;
    }
    const std::string where =
        in_file(file.path()) + "tensor " + in_quotes(name);
    header.entries.emplace(name, parse_entry(where, value));
  }
  check_layout(file.path(), header.entries, file.size() - header.data_begin);
  return header;
}

}  // namespace reprise::detail
