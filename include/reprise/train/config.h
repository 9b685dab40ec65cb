#pragma once

#include <reprise/models/model.h>
#include <reprise/train/lr_schedule.h>
#include <reprise/train/optimizer.h>

#include <cstdint>
#include <string>

namespace reprise {

/// Everything that decides what a training does. Plain data: the command fills
/// it, a run directory keeps it as JSON.
struct TrainConfig {
  std::string model = "cnn-basic";
  ModelOptions model_options{};
  std::string weights;  ///< safetensors to start from; empty: fresh

  std::string data;  ///< as in DataOptions; empty: "random"
  int64_t random_samples = 512;
  std::string resize =
      "device";  ///< where images are enlarged: device, workers
  int workers = 4;

  /// Two of the three decide; 0: not given. resolve() fills them.
  int64_t batch = 0;         ///< samples a micro-batch
  int64_t accumulate = 0;    ///< micro-batches a window
  int64_t global_batch = 0;  ///< samples a window; its last micro-batch is what
                             ///< is left: 10 as 3, 3, 3 and 1

  /// Processes that share each window, each with `accumulate` micro-batches of it
  /// at most: global_batch is batch × accumulate × ranks, or less where it cannot be
  /// divided. See distributed/group.h.
  int64_t ranks = 1;
  /// What each rank keeps a share of instead of the whole: "", optimizer.
  std::string shard;
  std::string reduce = "fp32";  ///< as what gradients travel: fp32, bf16
  int64_t bucket_bytes = int64_t{25}
                         << 20;  ///< of gradients that travel together
  /// Whether BatchNorm takes its statistics over the micro-batches that all ranks
  /// have at hand, not over each one's own.
  bool sync_norm = false;

  /// A Strategy, or "optimal": planned so that the peak stays within
  /// memory_limit. Empty: optimal where there is a limit, else none.
  std::string recompute;
  /// Whether the micro-step runs as a CUDA graph: auto, on, off. "auto": on CUDA,
  /// where it can be captured and fits memory_limit.
  std::string graph = "auto";
  /// Whether the linear layers' weights are copied to half precision once a window
  /// and their gradients added straight (WeightCopies): auto, on, off; each: copied
  /// at each use, which takes no memory. "auto": on CUDA on, or each where a plan
  /// for memory_limit is better with it. In fp32 there is nothing to copy.
  std::string weight_copies = "auto";
  /// Whether plans may keep activations in the host's memory (host_memory.h): auto,
  /// off. "auto": on CUDA, up to half of the memory that the host has free.
  std::string host_memory = "auto";
  std::string precision = "fp32";  ///< fp32, bf16, fp16
  double loss_scale = 65536;       ///< fp16: the first one
  OptimizerOptions optimizer{};
  bool quantize_embeddings = false;  ///< with adam8bit and adamw8bit
  LrScheduleOptions rate{};
  std::string scale_lr;    ///< "", linear, sqrt
  int64_t base_batch = 0;  ///< that the rate was tuned for, for scale_lr
  double clip = 0;         ///< largest norm of the gradient; 0: any

  int64_t steps = 0;   ///< updates in all; 0: by epochs
  int64_t epochs = 0;  ///< 0: by steps
  /// Of training, after which it ends with its window, whatever is left of the
  /// steps or epochs, but not before the speed is known: from half of it at least. 0: any.
  double seconds = 0;
  int64_t eval_every = 0;  ///< updates; 0: at the end of each epoch only
  /// On the test split; on random data only where `eval_every` is given.
  bool evaluate = true;

  std::string device = "cpu";
  /// How images and the weights of convolutions lie: "planes" (NCHW), or
  /// "channels-last" (NHWC), which tensor cores want. The same values.
  std::string layout = "planes";
  bool tf32 = false;  ///< products of single precision in TF32, on CUDA
  /// Products of single precision on CUDA: "auto" (on tensor cores where they are no
  /// less exact so, see ops/tf32x3_gemm.h) or "library". With `tf32` the library's.
  std::string fp32_products = "auto";
  bool autotune = false;     ///< cuDNN tries its algorithms; takes more memory
  int64_t memory_limit = 0;  ///< bytes the peak should not pass; 0: none given
  uint64_t seed = 1;
  int threads = 0;  ///< of the CPU; 0: LibTorch's choice

  int64_t save_every = 0;  ///< updates; 0: every ten minutes
  int keep = 2;            ///< states kept
  bool tensorboard = false;

  /// Fills batch, accumulate and global_batch from those given (none: 32 × 1)
  /// unless the micro-batch is to be planned, and checks every field that does
  /// not need the model. Throws c10::Error with the flag's name.
  void resolve();

  /// Most samples of a window that one rank has.
  int64_t share() const;

  /// The same windows among another number of processes: the micro-batch stays, or
  /// shrinks to the share.
  void share_among(int64_t processes);

  /// Whether the micro-batch is still open: "optimal" with only a global batch.
  bool plans_micro_batch() const;
};

std::string to_json(const TrainConfig& config);

/// Throws c10::Error where the text is no such configuration.
TrainConfig config_from_json(const std::string& text);

/// The first field that both must have in common for one to continue the other,
/// but have not: "model was gpt2, now bert-base". Empty: they go together.
std::string conflict(const TrainConfig& saved, const TrainConfig& now);

}  // namespace reprise
