#pragma once

#include <reprise/data/loader.h>
#include <reprise/data/safetensors.h>
#include <reprise/train/run_directory.h>
#include <reprise/train/scaler.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

/// States of a run on disk. Tested by tests/train/store/run_directory_test.cpp.
namespace reprise::detail {

/// Progress of a training, without its tensors.
struct RunState {
  int64_t step = 0;        ///< updates done
  int64_t micro = 0;       ///< micro-batches done in the current window
  double total_count = 0;  ///< samples or tokens of the current window
  double done_count = 0;   ///< those of them that are done
  LoaderPosition position{};
  GradScaler::State scaler{};
  int64_t samples = 0;        ///< samples trained on so far
  double train_s = 0;         ///< seconds of training so far
  int64_t metrics_bytes = 0;  ///< length of metrics.jsonl at this point
  /// The training was stopped during an evaluation, which must be repeated.
  bool evaluation_due = false;
  bool finished = false;  ///< the training has reached its end
  std::string data{};     ///< Dataset::fingerprint() of the training data
  int format = 2;         ///< of the files; 1: without checksums
};

/// Returns `state` in the format of a state file.
std::string to_text(const RunState& state);

/// Parses the result of to_text(). Throws std::exception if `text` is not a
/// state.
RunState run_state_from_text(const std::string& text);

/// Writes a state to `directory`, then removes all but the last `keep` states.
/// Throws reprise::Error if the state cannot be written.
void save_state(const RunDirectory& directory, const RunState& state,
                const NamedTensors& tensors, int keep);

/// A state that was read from disk.
struct SavedState {
  std::string path;
  RunState state;
  NamedTensors tensors;  ///< on the CPU
};

/// Reads the state that StateFiles::newest() finds.
std::optional<SavedState> newest_state(
    const RunDirectory& directory,
    const std::function<void(const std::string&)>& warn);

}  // namespace reprise::detail
