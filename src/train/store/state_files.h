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
/// Whatever number of ranks wrote a state, any other can read it. All files have checksums.
/// A state is whole if all its files are there, belong together and fit their checksums; no
/// other one is resumed from. States of versions without checksums are accepted if their
/// files are complete. Tested by
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
  /// A text that all parts of a state have, and no other state; empty for a single file.
  std::string save{};
};

using StateWarn = std::function<void(const std::string&)>;

/// Writes the part of a rank other than 0. Throws reprise::Error if it cannot be written.
void save_state_part(const std::string& directory, const RunState& state,
                     int rank, const StatePart& part);

/// Writes the part of rank 0 after all others, then removes all but the last `keep` states.
/// Counts this one and those before it that have all their bytes; those that do not are set
/// aside. States with a higher number are neither counted nor removed. Calls `warn` with what
/// is wrong with old states. Throws reprise::Error if the part cannot be written.
void save_state(
    const RunDirectory& directory, const RunState& state, int ranks,
    const StatePart& part, int keep,
    const StateWarn& warn = [](const std::string&) {});

/// Returns why a state is not whole; empty if it is. Reads all its bytes if `whole` is true,
/// and only the headers of its files otherwise. Throws reprise::Error if the system refuses to
/// read a file, which may be whole, and c10::Error if memory runs out.
std::string why_broken(const std::string& path, bool whole);

/// A state on disk, whose tensors are read one at a time.
class StateFiles {
 public:
  /// Opens the state at `path`. Throws std::exception if it is not whole, as far as that can
  /// be seen from the headers of its files.
  explicit StateFiles(const std::string& path);

  /// Returns the newest whole state in `directory`; nullopt if there has never been one.
  /// Newer ones that are not whole are set aside, and `warn` is called for each. Throws
  /// reprise::Error if states were set aside and none is whole, or if the system refuses to
  /// read or rename a file, and c10::Error if memory runs out.
  static std::optional<StateFiles> newest(const RunDirectory& directory,
                                          const StateWarn& warn);

  /// Reads all files and compares their checksums. Throws c10::Error that names the first
  /// file and tensor that differ.
  void verify() const;

  const std::string& path() const { return files_.front().path(); }
  const RunState& state() const { return state_; }
  bool has_checksums() const { return files_.front().has_checksums(); }

  struct Shape {
    torch::ScalarType type;
    std::vector<int64_t> sizes;
  };
  /// The tensors, sorted by name.
  const std::map<std::string, Shape>& tensors() const { return tensors_; }
  /// Reads a whole tensor into new CPU memory.
  torch::Tensor read(const std::string& name) const;

 private:
  struct Range {
    size_t file = 0;
    int64_t from = 0;
  };
  struct Divided {
    std::vector<int64_t> strides;
    std::vector<Range> ranges;
  };
  void add_pieces(size_t file);
  void check_files() const;
  void check_pieces() const;

  RunState state_;
  std::vector<SafeTensors> files_;
  std::map<std::string, Shape> tensors_;
  std::map<std::string, size_t> file_of_;   // of whole tensors
  std::map<std::string, Divided> divided_;  // the others
};

}  // namespace reprise::detail
