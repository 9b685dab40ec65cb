#pragma once

#include "train/store/run_state.h"

#include <reprise/data/safetensors.h>
#include <reprise/train/run_directory.h>

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

/// States whose tensors are divided among ranks. Each rank writes its pieces:
///
///     state-STEP-MICRO.part-1.safetensors    pieces of rank 1
///     state-STEP-MICRO.safetensors           rank 0's, written last: the state is whole
///
/// Whatever number of ranks wrote a state, any other can read it. Tested by
/// tests/train/store/state_files_test.cpp.
namespace reprise::detail {

/// A range of a tensor's values, in the order of its memory.
struct StatePiece {
  std::string name;
  torch::Tensor values;                 ///< one-dimensional
  std::vector<int64_t> sizes, strides;  ///< of the whole tensor, which is dense
  int64_t from = 0;                     ///< first value
};

/// What a rank adds to a state.
struct StatePart {
  NamedTensors whole;
  std::vector<StatePiece> pieces;
};

/// Writes the part of a rank other than 0. Throws reprise::Error if it cannot be written.
void save_state_part(const std::string& directory, const RunState& state,
                     int rank, const StatePart& part);

/// Writes the part of rank 0 after all others, then removes all but the last `keep` states.
/// Throws reprise::Error if it cannot be written.
void save_state(const RunDirectory& directory, const RunState& state, int ranks,
                const StatePart& part, int keep);

/// A state on disk, whose tensors are read one at a time.
class StateFiles {
 public:
  /// Returns the newest state in `directory` that can be read; nullopt if there is none. Calls
  /// `warn` for each newer state that cannot be read. Throws c10::Error if memory runs out.
  static std::optional<StateFiles> newest(
      const RunDirectory& directory,
      const std::function<void(const std::string&)>& warn);

  const std::string& path() const { return files_.front().path(); }
  const RunState& state() const { return state_; }

  struct Shape {
    torch::ScalarType type;
    std::vector<int64_t> sizes;
  };
  /// The tensors, sorted by name.
  const std::map<std::string, Shape>& tensors() const { return tensors_; }
  /// Reads a whole tensor into new CPU memory.
  torch::Tensor read(const std::string& name) const;

 private:
  explicit StateFiles(const std::string& path);

  struct Range {
    size_t file = 0;
    int64_t from = 0;
  };
  struct Divided {
    std::vector<int64_t> strides;
    std::vector<Range> ranges;
  };
  void add_pieces(size_t file);
  void check_pieces() const;

  RunState state_;
  std::vector<SafeTensors> files_;
  std::map<std::string, Shape> tensors_;
  std::map<std::string, size_t> file_of_;   // of whole tensors
  std::map<std::string, Divided> divided_;  // the others
};

}  // namespace reprise::detail
