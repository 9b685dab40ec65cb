#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace reprise {

/// Samples together, as the loader hands them over: on the CPU, images as bytes
/// in their own size, tokens as int64.
struct Batch {
  torch::Tensor
      inputs;  ///< (N, C, h, w) uint8, or float once enlarged; or (N, T) int64
  torch::Tensor targets;  ///< (N) int64, or (N, T) int64
  int64_t samples = 0;
  int64_t count = 0;  ///< what the loss is summed over: samples, or tokens
};

/// Samples by number. Reading is thread-safe.
class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual int64_t size() const = 0;
  virtual Batch get(const std::vector<int64_t>& indices) const = 0;
  /// What sample `index` adds to a batch's count, without reading it.
  virtual int64_t count(int64_t /*index*/) const { return 1; }
  /// Mean and deviation of the pixels, of values from 0 to 1.
  virtual double mean() const { return 0; }
  virtual double deviation() const { return 1; }
  /// What it holds in memory, for accounting.
  virtual std::vector<torch::Tensor> tensors() const { return {}; }
  /// Such as "mnist, 60000 images of 1×28×28, 10 classes".
  virtual std::string description() const = 0;
};

enum class Split { kTrain, kTest };

struct DataOptions {
  /// "mnist" or "fashion-mnist", looked for in $REPRISE_DATA, then in
  /// ${XDG_CACHE_HOME:-~/.cache}/reprise, then where Debian puts them;
  /// "random"; or a path: an IDX file of training images (plain or gzipped; its
  /// labels and the test images beside it under the usual names,
  /// train-labels-idx1-… and t10k-images-idx3-…), a text file (bytes are tokens),
  /// a .bin file of uint16 tokens (nanoGPT's headerless form or llm.c's with its
  /// header of 256 int32).
  std::string name{};
  Split split = Split::kTrain;
  /// What the model wants of a sample.
  bool tokens = false;           ///< a sequence, not an image
  bool classify = false;         ///< a sequence with a class (random data only)
  int64_t seq = 0;               ///< tokens a sample
  int64_t vocab = 0;             ///< of the model; tokens must be below
  int64_t classes = 0;           ///< of the model; labels must be below
  int64_t channels = 1;          ///< grey images are repeated to 3 on demand
  int64_t random_samples = 512;  ///< size of "random"
  int64_t random_side = 28;      ///< of a random image, before it is enlarged
  uint64_t seed = 1;             ///< of "random"
  double test_part = 0.1;        ///< of a text or token file: its end
};

/// Names of the datasets that need no path.
const std::vector<std::string>& dataset_names();

/// Images are read into memory, tokens are mapped. Sample i of text or tokens is
/// tokens i·seq to i·seq + seq: as inputs all but the last, as targets all but
/// the first. "random" is noise that depends on seed, split and number alone.
///
/// Throws c10::Error with one clear line: missing file (with what to do), corrupt
/// or truncated IDX, labels that do not match, a token or class out of range, a
/// text too short for one sample.
std::shared_ptr<const Dataset> open_dataset(const DataOptions& options);

}  // namespace reprise
