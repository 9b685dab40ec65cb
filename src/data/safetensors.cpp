#include "base/checksum.h"
#include "base/file.h"
#include "base/text_check.h"
#include "data/safetensors_header.h"
#include "data/tensor_checksums.h"

#include <reprise/base/error.h>
#include <reprise/data/safetensors.h>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <string_view>

namespace reprise {
namespace {

using nlohmann::json;
using Entry = SafeTensors::Entry;

constexpr uint64_t kLengthBytes = 8;
constexpr const char* kMetadata = detail::kMetadataKey;

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

torch::ScalarType type_named(std::string_view name) {
  for (const auto& known : kTypes) {
    if (known.name == name) return known.type;
  }
  TORCH_INTERNAL_ASSERT(false, "a type that the header may not have");
}

const char* name_of(torch::ScalarType type) {
  for (const auto& known : kTypes) {
    if (known.type == type) return known.name;
  }
  return nullptr;
}

/// Calls `read`; errors become c10::Error, as the interface promises.
template <class Read>
auto with_torch_errors(Read read) {
  try {
    return read();
  } catch (const Error& error) {
    TORCH_CHECK(false, error.what());
  }
}

}  // namespace

SafeTensors::SafeTensors(std::string path) : path_(std::move(path)) {
  auto header = with_torch_errors(
      [&] { return detail::read_safetensors_header(InputFile(path_)); });
  for (auto& [name, entry] : header.entries) {
    entries_.emplace(name, Entry{type_named(entry.type), std::move(entry.shape),
                                 entry.begin, entry.end});
  }
  metadata_ = std::move(header.metadata);
  data_begin_ = header.data_begin;
  read_checksums(header.text);
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
              path_, ": tensor ", quoted_name(name),
              " does not fit its checksum; the file is corrupt");
}

void SafeTensors::verify() const {
  if (!has_checksums_) return;
  constexpr uint64_t kPart = uint64_t{1} << 20;
  std::vector<char> part(kPart);
  with_torch_errors([&] {
    const InputFile file(path_);
    for (const auto& [name, entry] : entries_) {
      Checksum sum;
      for (uint64_t at = entry.begin; at < entry.end; at += kPart) {
        const uint64_t count = std::min(kPart, entry.end - at);
        file.read(data_begin_ + at, part.data(), count);
        sum.add(part.data(), count);
      }
      check_sum(name, sum.value());
    }
  });
}

torch::Tensor SafeTensors::read(const std::string& name) const {
  const auto found = entries_.find(name);
  TORCH_CHECK(found != entries_.end(), "[safetensors] ", path_, ": no tensor ",
              quoted_name(name));
  const Entry& entry = found->second;
  const bool is_bool = entry.type == torch::kBool;
  // A bool with a value other than 0 and 1 is undefined behavior.
  torch::Tensor tensor =
      torch::empty(entry.shape, is_bool ? torch::kByte : entry.type);
  if (entry.end > entry.begin) {
    with_torch_errors([&] {
      InputFile(path_).read(data_begin_ + entry.begin, tensor.data_ptr(),
                            entry.end - entry.begin);
    });
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
    TORCH_CHECK(type, "[safetensors] ", path, ": tensor ", quoted_name(name),
                " is ", tensor.scalar_type(),
                ", which the format does not support");
    TORCH_CHECK(name != kMetadata && !header.contains(name), "[safetensors] ",
                path, ": expected unique names, got ", quoted_name(name),
                " twice");
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
  TORCH_CHECK(header_bytes <= detail::kMaxHeaderBytes, "[safetensors] ", path,
              ": the header would take ", header_bytes, " bytes, more than ",
              detail::kMaxHeaderBytes);

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
