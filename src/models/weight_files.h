#pragma once

#include <reprise/data/safetensors.h>

#include <map>
#include <string>
#include <vector>

namespace reprise::detail {

/// The tensors of a checkpoint in one or several safetensors files.
/// Tested by tests/models/weights_test.cpp.
class WeightFiles {
 public:
  /// Opens `path`: a safetensors file; an index as Hugging Face writes it (*.json with a
  /// weight_map from tensors to files, which are next to it); or a directory with
  /// model.safetensors or model.safetensors.index.json. Reads headers only. Tensors of a
  /// file that the index does not list are ignored. Throws c10::Error if a file is missing
  /// or invalid, or lacks a tensor that the index lists.
  explicit WeightFiles(const std::string& path);

  /// The given path.
  const std::string& path() const { return path_; }
  /// The names of all tensors, sorted.
  std::vector<std::string> names() const;
  const std::vector<int64_t>& shape(const std::string& name) const;
  /// Reads a tensor into new CPU memory.
  torch::Tensor read(const std::string& name) const;

 private:
  void open_index(const std::string& path);

  std::string path_;
  std::vector<SafeTensors> files_;
  std::map<std::string, size_t> file_of_;  // by tensor
};

/// Whether `path` names an index of several files: it ends in .safetensors.index.json.
bool is_weight_index(const std::string& path);

/// Writes `tensors` to one file or, if `path` names an index, to files of at most `part_bytes`
/// next to it, then the index: BASE-00001-of-00003.safetensors and
/// BASE.safetensors.index.json. A larger tensor has a file of its own. The index is written last,
/// and an earlier one removed first: a checkpoint with an index is complete. Throws as
/// write_safetensors() does.
void write_weights(const std::string& path, const NamedTensors& tensors,
                   int64_t part_bytes);

}  // namespace reprise::detail
