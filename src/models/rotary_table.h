#pragma once

#include <torch/types.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

/// Angles of rotary position embeddings. Tested by tests/models/rotary_table_test.cpp.
namespace reprise::detail {

/// How Llama 3.1 and later stretch the frequencies for longer sequences (Hugging Face's
/// `rope_scaling` of type "llama3"). Wavelengths of more than `original_positions /
/// low_freq_factor` are multiplied by `factor`, those of less than `original_positions /
/// high_freq_factor` stay as they are, and those between are interpolated.
struct RopeScaling {
  double factor = 1;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  int64_t original_positions = 8192;
};

struct RotaryOptions {
  int64_t head_dim = 64;  ///< even
  int64_t positions = 0;  ///< rows of the tables
  double theta = 10'000;  ///< base of the frequencies
  std::optional<RopeScaling> scaling{};
};

/// The head_dim / 2 frequencies in radians per position, in float32 on the CPU, computed as
/// Hugging Face's LlamaRotaryEmbedding does.
torch::Tensor rotary_frequencies(const RotaryOptions& options);

/// Cosines and sines for ops::rotary(), made once per device when they are first needed and
/// shared by all layers. They are neither parameters nor buffers, so that no weight file has
/// them and no conversion of the model rounds them. Thread-safe.
class RotaryTable {
 public:
  explicit RotaryTable(const RotaryOptions& options) : options_(options) {}

  /// {cos, sin} of positions 0 to length - 1, (length, head_dim / 2) in float32: views of
  /// tables that live as long as this object. `length` must not exceed options.positions.
  std::pair<torch::Tensor, torch::Tensor> get(const torch::Device& device,
                                              int64_t length);

  /// {cos, sin} of `positions` (N, T) int64, (N, 1, T, head_dim / 2) each: copies, for rows
  /// whose positions do not simply count up.
  std::pair<torch::Tensor, torch::Tensor> at(const torch::Tensor& positions);

 private:
  RotaryOptions options_;
  std::mutex mutex_;
  // Never replaced, since CUDA graphs contain their addresses.
  std::map<std::pair<torch::DeviceType, int>,
           std::pair<torch::Tensor, torch::Tensor>>
      tables_;
};

}  // namespace reprise::detail
