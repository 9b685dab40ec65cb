#pragma once

#include <reprise/base/enum_text.h>

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace reprise {

/// A batch of samples: what the chain of a model takes, any number of tensors of
/// any type and shape. Loaders return batches on the CPU.
///
/// The built-in datasets have two, inputs and targets. Inputs are (N, C, H, W)
/// images of uint8 at their original size, float after prepare(); or (N, T)
/// tokens of int64. Targets are (N) int64, or (N, T) int64.
struct Batch {
  std::vector<torch::Tensor> tensors{};
  int64_t samples = 0;  ///< N
  /// What divides the sum of the losses: the number of samples, tokens, pixels.
  int64_t count = 0;
  bool prepared = false;  ///< whether TrainData::prepare has been applied
};

/// A map-style dataset; see stream.h for data without a size. The const members are
/// thread-safe, except order(). All batches have the same number of tensors, of the
/// same types, on the CPU. Their shapes may differ.
class Dataset {
 public:
  virtual ~Dataset() = default;
  /// Number of samples.
  virtual int64_t size() const = 0;
  /// Reads the samples with the given indices into one batch. Throws c10::Error
  /// if an index is out of range or a sample cannot be read.
  virtual Batch get(const std::vector<int64_t>& indices) const = 0;
  /// The contribution of sample `index` to Batch::count, without reading it.
  virtual int64_t count(int64_t /*index*/) const { return 1; }
  /// A batch of `samples` samples that needs the most memory, with which plans are
  /// measured. The default is the first samples, repeated if there are fewer. If
  /// shapes differ, return the longest; otherwise a plan may be too optimistic, and
  /// the training plans again when it exceeds its budget or runs out of memory.
  virtual Batch largest(int64_t samples) const;
  /// The indices of an epoch in the order of training; nullopt: all of them,
  /// shuffled. See with_order().
  virtual std::optional<std::vector<int64_t>> order(int64_t /*epoch*/,
                                                    uint64_t /*seed*/) const {
    return std::nullopt;
  }
  /// Number of samples per epoch: the length of order().
  virtual int64_t epoch_size() const { return size(); }
  /// Mean and standard deviation of the pixels, scaled to [0, 1].
  virtual double mean() const { return 0; }
  virtual double stddev() const { return 1; }
  /// Tensors that the dataset keeps in memory, for memory accounting.
  virtual std::vector<torch::Tensor> tensors() const { return {}; }
  /// Description for logs, such as "mnist, 60000 images of 1×28×28, 10 classes".
  virtual std::string description() const = 0;
  /// A text that differs if the samples differ. It is saved with a run, which is not resumed
  /// with data of another fingerprint. Empty, the default: not compared. Data whose samples
  /// are the same whenever they are read can return sample_fingerprint(*this), as all
  /// built-in data does.
  virtual std::string fingerprint() const { return {}; }
};

/// Returns a checksum of the number of samples and of up to 512 of them, evenly spaced.
/// Throws c10::Error if a sample cannot be read.
std::string sample_fingerprint(const Dataset& data);

/// Order of an epoch of a training with `seed`: indices of samples, which may be
/// left out or repeated. It must depend on nothing else, because a resumed run and
/// the other ranks ask for it again, and all epochs must have the same length. Called
/// by one thread at a time. Must not draw from LibTorch's default generators.
using EpochOrder =
    std::function<std::vector<int64_t>(int64_t epoch, uint64_t seed)>;

/// Returns `dataset` with another order of training: weighted, a subset, from easy to
/// hard. Evaluation still reads all samples by index. Throws c10::Error if the order
/// is empty, has an index out of range, or differs from call to call.
///
///     with_order(data, [n = data->size()](int64_t epoch, uint64_t seed) {
///       std::mt19937_64 random(seed + epoch);
///       std::vector<int64_t> order(1000);  // with replacement
///       for (int64_t& index : order) index = random() % n;
///       return order;
///     });
std::shared_ptr<const Dataset> with_order(
    std::shared_ptr<const Dataset> dataset, EpochOrder order);

enum class Split { kTrain, kTest };

/// How the documents of a token file become samples. With kPadded and kPacked, a
/// batch has three tensors of shape (N, seq) and type int64:
///
/// - tokens, 0 at padding;
/// - targets, the next token of the same document; -100 at the last token of a
///   document and at padding;
/// - segments, the number of the document within its row, counted from 1 from left to
///   right; 0 at padding.
///
/// The count is the number of targets that are not -100. A document ends with its
/// end token; longer documents than seq continue in further pieces, of which only
/// the last has a last token.
enum class DocumentMode {
  kStream,  ///< consecutive tokens without regard to documents; two tensors
  kPadded,  ///< one document, or piece of one, per row
  kPacked,  ///< as many whole documents per row as fit
};

template <>
struct EnumText<DocumentMode> {
  static constexpr std::array<std::string_view, 3> names{"stream", "padded",
                                                         "packed"};
};

struct DataOptions {
  /// The dataset to open:
  ///
  /// - "mnist" or "fashion-mnist", searched in $REPRISE_DATA, then in
  ///   ${XDG_CACHE_HOME:-~/.cache}/reprise, then in /usr/share/datasets;
  /// - "random";
  /// - the path of an IDX file of training images, plain or gzipped. Its labels
  ///   and the test images are found next to it under the usual names
  ///   (train-labels-idx1-..., t10k-images-idx3-...);
  /// - the path of a .bin file of uint16 tokens, without a header as written by
  ///   nanoGPT, or with the header of 256 int32 that llm.c writes;
  /// - the same with uint32 tokens: .u32, .bin32, or llm.c's header for Llama 3;
  /// - the path of a text file, whose bytes are the tokens.
  std::string name{};
  Split split = Split::kTrain;
  // The kind of samples that the model takes.
  bool tokens = false;           ///< sequences instead of images
  bool classify = false;         ///< one class per sequence; "random" only
  int64_t seq = 0;               ///< tokens per sample
  int64_t vocab = 0;             ///< vocabulary size of the model
  int64_t classes = 0;           ///< number of classes of the model
  int64_t channels = 1;          ///< 3 repeats the channel of grayscale images
  int64_t random_samples = 512;  ///< number of samples of "random"
  int64_t random_side = 28;      ///< side length of images of "random"
  uint64_t seed = 1;             ///< seed of "random"
  /// Fraction of a text or token file used for testing, taken from its end.
  double test_fraction = 0.1;
  // Documents of a text or token file.
  DocumentMode documents = DocumentMode::kStream;
  int64_t document_end = -1;  ///< last token of each document; text: a byte
};

/// Names of the datasets that need no path: the built-in ones, then those of
/// register_dataset().
std::vector<std::string> dataset_names();

/// Opens a dataset. Images are read into memory, text and tokens when they are needed. Sample i
/// of text or tokens spans tokens i·seq to i·seq + seq: all but the last are the
/// inputs, all but the first are the targets; see DocumentMode for documents. A
/// sample of "random" depends only on the seed, the split and its index.
///
/// Throws c10::Error with a one-line message if a file is missing (it says how to
/// get it), corrupt or truncated, if the numbers of images and labels differ, if
/// a token or label is out of range for the model, or if a file is too short for
/// one sample.
std::shared_ptr<const Dataset> open_dataset(const DataOptions& options);

/// A dataset with a name. `open` returns one split of it; DataOptions has the sizes that
/// the model was built with.
struct DatasetEntry {
  std::string name;
  std::function<std::shared_ptr<const Dataset>(const DataOptions& options)>
      open;
  /// See TrainData::prepare. Null: what the built-in models need, by their task.
  std::function<void(Batch&)> prepare{};
};

/// Adds a dataset, by whose name TrainConfig, studies and the command find it. Throws
/// c10::Error if the name is taken, empty, or has characters other than letters, digits,
/// '.', '-' and '_', or if it has no function to open it. Register at the beginning of
/// main(); not thread-safe.
void register_dataset(DatasetEntry entry);

/// Returns the entry of a dataset; null if there is none, as for the path of a file.
const DatasetEntry* find_dataset(std::string_view name);

/// How prepare() turns a batch of a built-in dataset into the input of a model.
struct PrepareOptions {
  int64_t image_size = 0;       ///< side length to resize to; 0: keep the size
  double mean = 0, stddev = 1;  ///< of the pixels, scaled to [0, 1]
  /// Per-pixel targets: class + 1 for pixels above 0.5, else 0.
  bool pixel_targets = false;
};

/// Resizes uint8 images (bilinear), converts them to float on their device and
/// normalizes them with `mean` and `stddev`; sets the targets. Float images and
/// tokens are left unchanged. Throws c10::Error if an option is invalid or the
/// inputs are not (N, C, H, W).
void prepare(Batch& batch, const PrepareOptions& options);

/// Moves all tensors to `device`; undefined ones stay undefined. Copies from pinned
/// memory are asynchronous.
void move_to(Batch& batch, torch::Device device);

}  // namespace reprise
