#include "base/checksum.h"
#include "base/file.h"
#include "data/tensor_checksums.h"

#include <reprise/data/safetensors.h>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <fstream>
#include <limits>
#include <optional>
#include <set>
#include <string_view>

namespace reprise {
namespace {

using nlohmann::json;
using Entry = SafeTensors::Entry;

static_assert(std::endian::native == std::endian::little,
              "the format is little-endian");

constexpr uint64_t kLengthBytes = 8;
/// The limit of the reference implementation.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr const char* kMetadata = "__metadata__";

struct TypeName {
  const char* name;
  torch::ScalarType type;
};
constexpr std::array<TypeName, 10> kTypes = {{
    {"F64", torch::kDouble},
    {"F32", torch::kFloat},
    {"F16", torch::kHalf},
    {"BF16", torch::kBFloat16},
    {"I64", torch::kLong},
    {"I32", torch::kInt},
    {"I16", torch::kShort},
    {"I8", torch::kChar},
    {"U8", torch::kByte},
    {"BOOL", torch::kBool},
}};

std::optional<torch::ScalarType> type_named(std::string_view name) {
  for (const auto& known : kTypes) {
    if (known.name == name) return known.type;
  }
  return std::nullopt;
}

const char* name_of(torch::ScalarType type) {
  for (const auto& known : kTypes) {
    if (known.type == type) return known.name;
  }
  return nullptr;
}

/// Returns nullopt if the size does not fit in 64 bits.
std::optional<uint64_t> byte_count(const std::vector<int64_t>& shape,
                                   torch::ScalarType type) {
  uint64_t bytes = c10::elementSize(type);
  for (const int64_t size : shape) {
    const auto factor = static_cast<uint64_t>(size);
    if (factor != 0 && bytes > std::numeric_limits<uint64_t>::max() / factor) {
      return std::nullopt;
    }
    bytes *= factor;
  }
  return bytes;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  return json(shape).dump();
}

/// Parses the header and rejects duplicate names, which the JSON parser accepts.
json parse_header(const std::string& path, const std::string& text) {
  std::set<std::string> names;
  std::string twice;
  const auto watch = [&](int depth, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::key && depth == 1 &&
        !names.insert(value.get<std::string>()).second) {
      twice = value.get<std::string>();
    }
    return true;
  };
  const json header = json::parse(text, watch, /*allow_exceptions=*/false);
  TORCH_CHECK(header.is_object(), "[safetensors] ", path,
              ": expected a header that is a JSON object, got something else; "
              "the file is corrupt or not in this format");
  TORCH_CHECK(twice.empty(), "[safetensors] ", path, ": tensor '", twice,
              "' occurs twice");
  return header;
}

bool all_counts(const json& list) {
  return list.is_array() &&
         std::all_of(list.begin(), list.end(), [](const json& item) {
           return item.is_number_unsigned() &&
                  item.get<uint64_t>() <=
                      uint64_t{std::numeric_limits<int64_t>::max()};
         });
}

Entry parse_entry(const std::string& where, const json& value) {
  TORCH_CHECK(value.is_object() && value.contains("dtype") &&
                  value["dtype"].is_string() && value.contains("shape") &&
                  all_counts(value["shape"]) &&
                  value.contains("data_offsets") &&
                  all_counts(value["data_offsets"]) &&
                  value["data_offsets"].size() == 2,
              where, " expected dtype, shape and data_offsets, got ",
              value.dump(-1, ' ', false, json::error_handler_t::replace));
  const auto name = value["dtype"].get<std::string>();
  const auto type = type_named(name);
  TORCH_CHECK(type, where, " has type ", name,
              "; expected one of F64, F32, F16, BF16, I64, I32, I16, I8, U8, "
              "BOOL");
  Entry entry{*type, value["shape"].get<std::vector<int64_t>>(),
              value["data_offsets"][0].get<uint64_t>(),
              value["data_offsets"][1].get<uint64_t>()};
  TORCH_CHECK(entry.begin <= entry.end, where, " ends at byte ", entry.end,
              " before it begins at byte ", entry.begin);
  const auto expected = byte_count(entry.shape, entry.type);
  TORCH_CHECK(expected && *expected == entry.end - entry.begin, where,
              " has shape ", shape_text(entry.shape), " of ", name,
              ", which does not fit its ", entry.end - entry.begin, " bytes");
  return entry;
}

/// Checks that every byte of the data belongs to exactly one tensor.
void check_layout(const std::string& path,
                  const std::map<std::string, Entry>& entries,
                  uint64_t data_bytes) {
  std::vector<std::pair<const std::string*, const Entry*>> in_order;
  for (const auto& [name, entry] : entries) in_order.push_back({&name, &entry});
  std::stable_sort(in_order.begin(), in_order.end(),
                   [](const auto& a, const auto& b) {
                     return std::pair(a.second->begin, a.second->end) <
                            std::pair(b.second->begin, b.second->end);
                   });
  uint64_t at = 0;
  for (const auto& [name, entry] : in_order) {
    TORCH_CHECK(entry->begin >= at, "[safetensors] ", path, ": tensor '", *name,
                "' begins at byte ", entry->begin,
                ", inside the tensor before it, which ends at ", at);
    TORCH_CHECK(entry->begin == at, "[safetensors] ", path, ": bytes ", at,
                " to ", entry->begin, ", before tensor '", *name,
                "', belong to no tensor");
    TORCH_CHECK(entry->end <= data_bytes, "[safetensors] ", path, ": tensor '",
                *name, "' ends at byte ", entry->end, " of ", data_bytes,
                "; the file is truncated");
    at = entry->end;
  }
  TORCH_CHECK(at == data_bytes, "[safetensors] ", path, ": the last ",
              data_bytes - at, " bytes belong to no tensor");
}

}  // namespace

SafeTensors::SafeTensors(std::string path) : path_(std::move(path)) {
  std::ifstream file(path_, std::ios::binary | std::ios::ate);
  TORCH_CHECK(file, "[safetensors] cannot open ", path_);
  const auto end = static_cast<int64_t>(file.tellg());
  TORCH_CHECK(end >= 0, "[safetensors] cannot read ", path_);
  const auto file_bytes = static_cast<uint64_t>(end);
  TORCH_CHECK(file_bytes >= kLengthBytes, "[safetensors] ", path_,
              ": expected at least 8 bytes, got ", file_bytes,
              "; the file is truncated");
  uint64_t header_bytes = 0;
  file.seekg(0);
  file.read(reinterpret_cast<char*>(&header_bytes), kLengthBytes);
  TORCH_CHECK(file, "[safetensors] cannot read ", path_);
  TORCH_CHECK(header_bytes <= kMaxHeaderBytes, "[safetensors] ", path_,
              ": the header claims ", header_bytes, " bytes, more than ",
              kMaxHeaderBytes, "; the file is corrupt or not in this format");
  TORCH_CHECK(header_bytes <= file_bytes - kLengthBytes, "[safetensors] ",
              path_, ": the header claims ", header_bytes,
              " bytes, the file has ", file_bytes, "; it is truncated");
  std::string text(header_bytes, '\0');
  file.read(text.data(), static_cast<std::streamsize>(header_bytes));
  TORCH_CHECK(file, "[safetensors] cannot read the header of ", path_);
  data_begin_ = kLengthBytes + header_bytes;

  const json header = parse_header(path_, text);
  for (const auto& [name, value] : header.items()) {
    if (name == kMetadata) {
      TORCH_CHECK(value.is_object(), "[safetensors] ", path_,
                  ": expected metadata that is a JSON object");
      for (const auto& [key, item] : value.items()) {
        TORCH_CHECK(item.is_string(), "[safetensors] ", path_,
                    ": expected metadata values that are strings, '", key,
                    "' is not");
        metadata_[key] = item.get<std::string>();
      }
      continue;
    }
    const std::string where =
        "[safetensors] " + path_ + ": tensor '" + name + "'";
    entries_.emplace(name, parse_entry(where, value));
  }
  check_layout(path_, entries_, file_bytes - data_begin_);
  read_checksums(text);
}

void SafeTensors::read_checksums(const std::string& header) {
  const auto found = metadata_.find(detail::kChecksumsKey);
  if (found == metadata_.end()) return;
  for (const auto& [name, entry] : entries_) checksums_[name] = 0;
  auto parsed = detail::parse_checksums(header, found->second, checksums_);
  TORCH_CHECK(parsed, "[safetensors] ", path_,
              ": the header does not fit its checksum; the file is corrupt");
  checksums_ = std::move(*parsed);
  has_checksums_ = true;
  metadata_.erase(found);
}

void SafeTensors::check_sum(const std::string& name, uint64_t sum) const {
  TORCH_CHECK(!has_checksums_ || checksums_.at(name) == sum, "[safetensors] ",
              path_, ": tensor '", name,
              "' does not fit its checksum; the file is corrupt");
}

void SafeTensors::verify() const {
  if (!has_checksums_) return;
  constexpr uint64_t kPart = uint64_t{1} << 20;
  std::vector<char> part(kPart);
  std::ifstream file(path_, std::ios::binary);
  for (const auto& [name, entry] : entries_) {
    Checksum sum;
    for (uint64_t at = entry.begin; at < entry.end; at += kPart) {
      const uint64_t count = std::min(kPart, entry.end - at);
      file.seekg(static_cast<std::streamoff>(data_begin_ + at));
      file.read(part.data(), static_cast<std::streamsize>(count));
      TORCH_CHECK(file, "[safetensors] cannot read tensor '", name, "' of ",
                  path_);
      sum.add(part.data(), count);
    }
    check_sum(name, sum.value());
  }
}

torch::Tensor SafeTensors::read(const std::string& name) const {
  const auto found = entries_.find(name);
  TORCH_CHECK(found != entries_.end(), "[safetensors] ", path_, ": no tensor '",
              name, "'");
  const Entry& entry = found->second;
  const bool is_bool = entry.type == torch::kBool;
  // A bool with a value other than 0 and 1 is undefined behavior.
  torch::Tensor tensor =
      torch::empty(entry.shape, is_bool ? torch::kByte : entry.type);
  if (entry.end > entry.begin) {
    std::ifstream file(path_, std::ios::binary);
    file.seekg(static_cast<std::streamoff>(data_begin_ + entry.begin));
    file.read(static_cast<char*>(tensor.data_ptr()),
              static_cast<std::streamsize>(entry.end - entry.begin));
    TORCH_CHECK(file, "[safetensors] ", path_, ": cannot read tensor '", name,
                "'; the file has changed since it was opened");
  }
  if (has_checksums_) {
    check_sum(name, checksum_of(tensor.data_ptr(), tensor.nbytes()));
  }
  return is_bool ? tensor.ne(0) : tensor;
}

void write_safetensors(const std::string& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata) {
  // Wide types first, like the reference implementation, so that every tensor is
  // aligned to its element size.
  NamedTensors sorted = tensors;
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto& a, const auto& b) {
                     return a.second.element_size() > b.second.element_size();
                   });
  json header = json::object();
  header[kMetadata] = metadata;
  header[kMetadata][detail::kChecksumsKey] =
      detail::empty_checksums(sorted.size());
  uint64_t at = 0;
  for (const auto& [name, tensor] : sorted) {
    const char* type = name_of(tensor.scalar_type());
    TORCH_CHECK(type, "[safetensors] ", path, ": tensor '", name, "' is ",
                tensor.scalar_type(), ", which the format does not support");
    TORCH_CHECK(name != kMetadata && !header.contains(name), "[safetensors] ",
                path, ": expected unique names, got '", name, "' twice");
    const uint64_t end =
        at + static_cast<uint64_t>(tensor.numel()) * tensor.element_size();
    header[name] = {{"dtype", type},
                    {"shape", tensor.sizes().vec()},
                    {"data_offsets", {at, end}}};
    at = end;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const json::exception&) {
    TORCH_CHECK(false, "[safetensors] ", path,
                ": expected names and metadata in UTF-8");
  }
  text.append((kLengthBytes - text.size() % kLengthBytes) % kLengthBytes, ' ');
  const uint64_t header_bytes = text.size();
  TORCH_CHECK(header_bytes <= kMaxHeaderBytes, "[safetensors] ", path,
              ": the header would take ", header_bytes, " bytes, more than ",
              kMaxHeaderBytes);

  AtomicFile file(path);
  file.write(&header_bytes, kLengthBytes);
  file.write(text);
  detail::TensorChecksums sums;
  for (const auto& [name, tensor] : sorted) {
    const torch::Tensor plain = tensor.detach().cpu().contiguous();
    sums[name] = checksum_of(plain.data_ptr(), plain.nbytes());
    file.write(plain.data_ptr(), plain.nbytes());
  }
  detail::fill_checksums(text, sums);
  file.rewrite(kLengthBytes, text);
  file.commit();
}

}  // namespace reprise
