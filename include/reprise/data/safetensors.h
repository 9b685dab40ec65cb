#pragma once

#include <torch/types.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace reprise {

using NamedTensors = std::vector<std::pair<std::string, torch::Tensor>>;

/// A safetensors file opened for reading: 8 bytes of header length, a JSON header
/// and raw little-endian tensors. The constructor reads the header only; read()
/// reads one tensor.
///
/// Errors are c10::Error and name the file and, if applicable, the tensor. They
/// cover truncated files, headers that are not JSON, overlapping tensors, bytes
/// that belong to no tensor, unknown types, and sizes that do not match the shape.
///
/// Files of write_safetensors() have checksums. That of the header is compared when the file
/// is opened, and that of a tensor when it is read.
class SafeTensors {
 public:
  explicit SafeTensors(std::string path);

  struct Entry {
    torch::ScalarType type;
    std::vector<int64_t> shape;
    uint64_t begin = 0;  ///< first byte, counted from the end of the header
    uint64_t end = 0;    ///< one past the last byte
  };

  const std::string& path() const { return path_; }
  /// The tensors in the file, sorted by name.
  const std::map<std::string, Entry>& entries() const { return entries_; }
  /// Without the checksums.
  const std::map<std::string, std::string>& metadata() const {
    return metadata_;
  }

  /// False for files of other programs and of earlier versions.
  bool has_checksums() const { return has_checksums_; }
  /// Reads all tensors, in parts, and compares their checksums, if the file has some.
  void verify() const;

  /// Reads a tensor into new CPU memory.
  torch::Tensor read(const std::string& name) const;

 private:
  void read_checksums(const std::string& header);
  void check_sum(const std::string& name, uint64_t sum) const;

  std::string path_;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
  std::map<std::string, uint64_t> checksums_;
  bool has_checksums_ = false;
  uint64_t data_begin_ = 0;
};

/// Writes `tensors` with checksums, atomically: on failure, an existing file at `path` is unchanged.
/// Tensors may be on any device. Throws c10::Error if a type is not supported, or a
/// name occurs twice or is not UTF-8; reprise::Error if the file cannot be written.
void write_safetensors(const std::string& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace reprise
