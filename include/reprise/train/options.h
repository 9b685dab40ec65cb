#pragma once

#include <reprise/base/enum_text.h>
#include <reprise/plan/modes.h>
#include <reprise/train/optimizer.h>

#include <cstdint>
#include <string>

namespace reprise {

/// Type in which ranks exchange gradients.
enum class ReduceType { kFp32, kBf16 };

template <>
struct EnumText<ReduceType> {
  static constexpr std::array<std::string_view, 2> names{"fp32", "bf16"};
};

/// Where images are enlarged: on the training device or in the loader's threads.
enum class ResizePlace { kDevice, kWorkers };

template <>
struct EnumText<ResizePlace> {
  static constexpr std::array<std::string_view, 2> names{"device", "workers"};
};

/// Matrix products on CUDA. kAuto: in fp32, on tensor cores if that is no less exact
/// (ops/tf32x3_gemm.h); in half precision, with the fastest of the library's algorithms,
/// which are tried when shapes occur first. kLibrary: as LibTorch computes them.
enum class MatrixProducts { kAuto, kLibrary };

template <>
struct EnumText<MatrixProducts> {
  static constexpr std::array<std::string_view, 2> names{"auto", "library"};
};

/// Options of a training that are independent of its model and dataset. Plain
/// data. Every member is described in src/train/config/option_fields.cpp, from
/// which the command line, JSON, validation and comparisons are generated.
struct TrainOptions {
  // Batches. Two of batch, accumulate and global_batch decide the third; 0: not
  // given. resolve() fills them.

  int64_t batch = 0;       ///< samples per micro-batch
  int64_t accumulate = 0;  ///< micro-batches per window and rank
  /// Samples per window: batch × accumulate × ranks, or less if it is not
  /// divisible. The last micro-batch has the remainder: 10 as 3, 3, 3 and 1.
  int64_t global_batch = 0;
  ResizePlace resize = ResizePlace::kDevice;
  int workers = 4;  ///< threads that load data

  // Ranks (distributed/group.h).

  int64_t ranks = 1;  ///< processes that share each window
  Sharding shard = Sharding::kNone;
  /// Consecutive ranks that share one copy of what is divided, such as those of one machine;
  /// groups of them add up their gradients. 0: all ranks.
  int64_t shard_group = 0;
  ReduceType reduce = ReduceType::kFp32;
  int64_t bucket_bytes = int64_t{25} << 20;  ///< gradients reduced together
  /// Batch normalisation over the micro-batches of all ranks.
  bool sync_norm = false;

  // Memory.

  /// A Strategy, a schedule, or "optimal": planned so that the peak stays within
  /// memory_limit. Empty or "auto": optimal if there is a limit. Without one, a training on
  /// CUDA is planned for the free memory of the device if it is long enough to pay for
  /// that, or does not fit otherwise; any other is "none".
  std::string recompute{};
  int64_t memory_limit = 0;  ///< bytes that the peak must not exceed; 0: none
  GraphMode graph = GraphMode::kAuto;
  WeightCopiesMode weight_copies = WeightCopiesMode::kAuto;
  /// Pinned host memory for activations and state, on CUDA: a size such as "64GiB" that is not
  /// exceeded, "off", or "auto": three quarters of the host's free memory.
  std::string host_memory = "auto";
  UpdateMode update = UpdateMode::kAuto;
  StatePlace state = StatePlace::kAuto;
  /// Share of the optimizer's state that StatePlace::kHost moves to host memory. Plans choose
  /// it with StatePlace::kAuto.
  double host_share = 1;
  GradientSums gradients = GradientSums::kFp32;
  ParameterType parameters = ParameterType::kFp32;

  // Arithmetic.

  Precision precision = Precision::kFp32;
  double loss_scale = 65536;  ///< initial scale of the loss with fp16
  ImageLayout layout = ImageLayout::kAuto;
  /// Matrix products and convolutions of fp32 values in TF32 on CUDA. With bf16 and fp16
  /// they always are.
  bool tf32 = false;
  MatrixProducts fp32_products = MatrixProducts::kAuto;  ///< ignored with tf32
  MatrixProducts half_products = MatrixProducts::kAuto;
  Autotune autotune = Autotune::kAuto;

  // Optimization.

  OptimizerOptions optimizer{};
  /// Quantize the state of embeddings too, with an 8-bit optimizer.
  bool quantize_embeddings = false;
  LrScheduleOptions rate{};
  LrScaling scale_lr = LrScaling::kNone;
  int64_t base_batch = 0;  ///< global batch that the rate was tuned for
  double clip = 0;         ///< largest norm of the gradient; 0: no limit

  // Length and evaluation.

  int64_t steps = 0;   ///< updates in total; 0: decided by epochs
  int64_t epochs = 0;  ///< 0: decided by steps
  /// Training time after which the run ends with its current window, regardless
  /// of the remaining steps or epochs. 0: no limit.
  double seconds = 0;
  int64_t eval_every = 0;  ///< updates; 0: at the end of each epoch
  /// Evaluate on the test split. On random data only if eval_every is given.
  bool evaluate = true;
  uint64_t seed = 1;

  // Machine.

  std::string device = "cpu";  ///< cpu, cuda or cuda:N
  int threads = 0;             ///< CPU threads; 0: LibTorch's default

  // Saving.

  int64_t save_every = 0;  ///< updates; 0: every ten minutes
  int keep = 2;            ///< number of saved states kept
  bool tensorboard = false;

  /// Checks every field and fills batch, accumulate and global_batch from those
  /// given (none: 32 × 1), unless the micro-batch is to be planned. Throws
  /// c10::Error that begins with the flag's name in brackets.
  void resolve();

  /// Largest number of samples per window and rank.
  int64_t share() const;

  /// Divides the windows among `processes` ranks. The micro-batch stays, or shrinks
  /// to the share of a rank.
  void share_among(int64_t processes);

  /// Ranks that share one copy of what is divided; 1 if nothing is.
  int64_t sharing_ranks() const;

  /// True if the schedule is planned: recompute is "optimal".
  bool plans_schedule() const;

  /// True if the schedule is planned for the free memory if the training is long enough:
  /// recompute is "auto".
  bool plans_if_long() const;

  /// True if the micro-batch is planned too: only a global batch is given.
  bool plans_micro_batch() const;
};

/// JSON object with one key per field, named as on the command line.
std::string to_json(const TrainOptions& options);

/// Reads such an object; keys of other fields are ignored. Throws c10::Error if a
/// field is missing that must match on resume, or if a value has another type. Other
/// missing fields get their defaults.
TrainOptions options_from_json(const std::string& text);

}  // namespace reprise
