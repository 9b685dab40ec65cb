#pragma once

#include <torch/types.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace reprise {

using NamedTensors = std::vector<std::pair<std::string, torch::Tensor>>;

/// A file in the safetensors format (8 bytes of header length, a JSON header,
/// raw little-endian tensors), open for reading. Only the header is read until
/// a tensor is asked for.
///
/// Every error is a c10::Error that names the file and, where there is one, the
/// tensor: truncated, header that is not JSON, overlapping or missing bytes,
/// unknown type, bytes that do not fit the shape.
class SafeTensors {
 public:
  explicit SafeTensors(std::string path);

  struct Entry {
    torch::ScalarType type;
    std::vector<int64_t> shape;
    uint64_t begin = 0;  // from the first byte after the header
    uint64_t end = 0;
  };

  const std::string& path() const { return path_; }
  /// By name, in the order of names.
  const std::map<std::string, Entry>& entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const {
    return metadata_;
  }

  /// A new CPU tensor.
  torch::Tensor read(const std::string& name) const;

 private:
  std::string path_;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
  uint64_t data_begin_ = 0;
};

/// Writes `tensors` (any device; made contiguous one at a time) atomically. Throws
/// reprise::Error if the file cannot be written.
void write_safetensors(const std::string& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace reprise
