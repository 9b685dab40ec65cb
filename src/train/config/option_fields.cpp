// The fields of TrainOptions.
// Tested by tests/train/config/fields_test.cpp.
#include "base/nearest.h"
#include "base/text_check.h"

#include <reprise/recompute/strategy.h>
#include <reprise/train/fields.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace reprise {
namespace {

using O = TrainOptions;
using Options = FieldTable<TrainOptions>;

constexpr uint64_t kMostUpdates = 1'000'000'000'000;
constexpr uint64_t kMostInBatch = 1'000'000'000;
constexpr int64_t kLeastBucket = 1024;

/// A few times the machine's processors: more threads than that only contend.
uint64_t most_threads() {
  return std::max(64U, 4 * std::thread::hardware_concurrency());
}

/// A Strategy, "optimal", "auto", or a schedule.
FieldCheck recompute_check() {
  return
      [strategy = strategy_text({"optimal", "auto"})](const std::string& text) {
        return is_schedule_text(text) ? std::string() : strategy(text);
      };
}

/// The words that `recompute_check` allows.
std::vector<std::string> strategy_words() {
  std::vector<std::string> words = strategy_names();
  words.insert(words.end(), {"optimal", "auto"});
  return words;
}

/// One of `words`, or a size in bytes.
FieldCheck size_or(std::vector<std::string> words) {
  return [words = std::move(words)](const std::string& text) -> std::string {
    if (std::find(words.begin(), words.end(), text) != words.end()) return "";
    const bool number = !text.empty() && std::isdigit(text.front()) != 0;
    if (number) return byte_size(1)(text);
    return fmt::format("expected {} or a size such as 8GiB, got {}{}",
                       fmt::join(words, ", "), in_quotes(text),
                       did_you_mean(text, words));
  };
}

void add_loading(Options& table) {
  table
      .add(&O::workers, {.name = "workers",
                         .group = "Data",
                         .help = "Number of threads that load data",
                         .check = whole_number(0, most_threads()),
                         .affects_costs = true,
                         .same_on_ranks = false})
      .add(&O::resize, {.name = "resize",
                        .group = "Data",
                        .help = "Where to enlarge images",
                        .affects_costs = true});
}

void add_batches(Options& table) {
  table
      .add(&O::batch, {.name = "batch",
                       .group = "Training",
                       .help = "Samples per micro-batch (default 32)",
                       .check = whole_number(1, 1 << 24),
                       .unset = "0",
                       .same_on_resume = true})
      .add(&O::accumulate, {.name = "accumulate",
                            .group = "Training",
                            .help = "Micro-batches per update (default 1)",
                            .check = whole_number(1, 1 << 24),
                            .unset = "0",
                            .same_on_resume = true})
      .add(&O::global_batch,
           {.name = "global-batch",
            .group = "Training",
            .help = "Samples per update: --batch × --accumulate; the last "
                    "micro-batch may be smaller",
            .check = whole_number(1, kMostInBatch),
            .unset = "0",
            .same_on_resume = true});
}

void add_memory(Options& table) {
  table
      .add(&O::recompute,
           {.name = "recompute",
            .group = "Training",
            .help = fmt::format(
                "Strategy: {}; optimal: the fastest within --memory; or a "
                "schedule as "
                "reprise plan prints it. Default: optimal with --memory; "
                "without, the fastest within the free memory of a CUDA device "
                "if the training is long enough to plan it, else none",
                fmt::join(strategy_names(), ", ")),
            .check = recompute_check(),
            .metavar = "STRATEGY",
            .choices = strategy_words()})
      .add(&O::precision, {.name = "precision",
                           .group = "Training",
                           .help = "Type of activations and matrix products",
                           .same_on_resume = true,
                           .affects_costs = true})
      .add(
          &O::weight_copies,
          {.name = "weight-copies",
           .group = "Training",
           .help = "Copies of the linear layers' weights in bf16 or fp16, with "
                   "gradients accumulated in place: on, one per window; split, "
                   "bf16 inside the weights, which takes no memory; each, one "
                   "per use, which takes none either; auto, on with CUDA, or "
                   "another if --memory requires it",
           .affects_costs = true})
      .add(&O::host_memory,
           {.name = "host-memory",
            .group = "Training",
            .help = "Pinned host memory for activations and state that plans "
                    "move there: a size such as 64GiB; off; auto, on CUDA, up "
                    "to three quarters of the free memory",
            .check = size_or({"auto", "off"}),
            .metavar = "SIZE",
            .affects_costs = true,
            .choices = {"auto", "off"}})
      .add(&O::update,
           {.name = "update",
            .group = "Training",
            .help = "When to update the parameters: after the backward; in the "
                    "backward, each as soon as its gradient is complete, so "
                    "that gradients take no memory, with one micro-batch per "
                    "update; auto, after, or backward if that is better "
                    "within --memory"})
      .add(&O::state,
           {.name = "state",
            .group = "Training",
            .help = "Memory of the training's state: device; host, for the "
                    "optimizer's state, which updates stream through the "
                    "device; host-all, for parameters and gradients too, of "
                    "which a stage's are on the device while it runs; auto, "
                    "device, or what is best within --memory",
            .affects_costs = true})
      .add(&O::host_share,
           {.name = "host-share",
            .group = "Training",
            .help = "Part of the optimizer's state that --state host moves; "
                    "the rest stays on the device. Plans within --memory "
                    "choose it if --state is auto",
            .check = real_number(0, 1)})
      .add(&O::gradients,
           {.name = "gradients",
            .group = "Training",
            .help = "Sums of gradients over several micro-batches: fp32, "
                    "exact; bf16, with stochastic rounding, which takes half "
                    "of the memory and changes results",
            .same_on_resume = true,
            .affects_costs = true})
      .add(&O::parameters,
           {.name = "parameters",
            .group = "Training",
            .help = "Type of the linear layers' weights: fp32; bf16, updated "
                    "in fp32 and rounded stochastically, which takes half of "
                    "the memory and changes results",
            .same_on_resume = true,
            .affects_costs = true})
      .add(&O::loss_scale, {.name = "loss-scale",
                            .group = "Training",
                            .help = "Initial scale of the loss, for fp16",
                            .check = real_number(0, 1e30, Ends::kNone),
                            .same_on_resume = true});
}

FieldTable<OptimizerOptions> optimizer_fields() {
  using P = OptimizerOptions;
  const auto number = [](const char* name, const char* help, FieldCheck check) {
    return FieldInfo{.name = name,
                     .group = "Training",
                     .help = help,
                     .check = std::move(check),
                     .same_on_resume = true};
  };
  const FieldCheck beta = real_number(0, 1, Ends::kLow);
  FieldTable<P> table;
  table.add(&P::name, {.name = "optimizer",
                       .group = "Training",
                       .help = fmt::format(
                           "Optimizer: {}; the 8-bit kinds have a quarter of "
                           "adam's state",
                           fmt::join(optimizer_names(), ", ")),
                       .check = one_of(optimizer_names()),
                       .metavar = "NAME",
                       .same_on_resume = true,
                       .affects_costs = true,
                       .choices = optimizer_names()});
  FieldInfo momentum = number("momentum", "Momentum of sgd", beta);
  momentum.affects_costs = true;
  table.add(&P::momentum, momentum)
      .add(&P::nesterov, number("nesterov", "Nesterov momentum of sgd", {}))
      .add(&P::beta1, number("beta1", "Decay of adam's first moment", beta))
      .add(&P::beta2, number("beta2", "Decay of adam's second moment", beta))
      .add(&P::eps, number("eps", "Term added to the denominator of adam",
                           real_number(0, 1, Ends::kNone)))
      .add(&P::weight_decay,
           number("weight-decay", "Weight decay", real_number(0, 1000)));
  return table;
}

FieldTable<LrScheduleOptions> lr_fields() {
  using L = LrScheduleOptions;
  const auto field = [](const char* name, const char* help, FieldCheck check) {
    return FieldInfo{.name = name,
                     .group = "Training",
                     .help = help,
                     .check = std::move(check),
                     .same_on_resume = true};
  };
  FieldTable<L> table;
  table.add(&L::base, field("lr", "Learning rate", real_number(0, 1000)))
      .add(&L::schedule,
           field("lr-schedule", "Learning rate after the warm-up", {}))
      .add(&L::warmup_steps,
           field("warmup", "Number of updates of linear warm-up",
                 whole_number(0, kMostUpdates)))
      .add(&L::lowest, field("lr-lowest", "Last learning rate of cosine",
                             real_number(0, 1000)));
  return table;
}

void add_optimization(Options& table) {
  table.add_part(&O::optimizer, optimizer_fields());
  table.add(&O::quantize_embeddings,
            {.name = "quantize-embeddings",
             .group = "Training",
             .help = "Quantize the state of embeddings too, with an 8-bit "
                     "optimizer",
             .same_on_resume = true,
             .affects_costs = true});
  table.add_part(&O::rate, lr_fields());
  table
      .add(&O::scale_lr,
           {.name = "scale-lr",
            .group = "Training",
            .help = "Scaling of --lr from --base-batch to the global batch",
            .same_on_resume = true})
      .add(&O::base_batch, {.name = "base-batch",
                            .group = "Training",
                            .help = "Global batch that --lr was tuned for",
                            .check = whole_number(1, kMostInBatch),
                            .unset = "0",
                            .same_on_resume = true})
      .add(&O::clip, {.name = "clip",
                      .group = "Training",
                      .help = "Largest norm of the gradient (0: no limit)",
                      .check = real_number(0, 1e9),
                      .same_on_resume = true});
}

void add_length(Options& table) {
  table
      .add(&O::steps, {.name = "steps",
                       .group = "Training",
                       .help = "Number of updates",
                       .check = whole_number(1, kMostUpdates),
                       .unset = "0"})
      .add(&O::epochs, {.name = "epochs",
                        .group = "Training",
                        .help = "Number of passes over the data (default 1)",
                        .check = whole_number(1, 1'000'000'000),
                        .unset = "0"})
      .add(&O::seconds,
           {.name = "seconds",
            .group = "Training",
            .help = "Training time after which the run ends with its current "
                    "update (0: no limit)",
            .check = real_number(0, 1e9)})
      .add(&O::seed,
           {.name = "seed",
            .group = "Training",
            .help = "Seed of weights, data order and dropout",
            .check = whole_number(0, std::numeric_limits<uint64_t>::max()),
            .same_on_resume = true})
      .add(&O::eval_every,
           {.name = "eval-every",
            .group = "Evaluation",
            .help = "Updates between evaluations (0: at the end of each epoch)",
            .check = whole_number(0, kMostUpdates)})
      .add_negated(&O::evaluate, {.name = "no-eval",
                                  .group = "Evaluation",
                                  .help = "Do not evaluate"});
}

void add_machine(Options& table) {
  table
      .add(&O::device, {.name = "device",
                        .group = "Machine",
                        .help = "Device: cpu, cuda or cuda:N",
                        .check = device_name(),
                        .metavar = "DEVICE",
                        .same_on_ranks = false,
                        .choices = {"cpu", "cuda"}})
      .add(&O::threads,
           {.name = "threads",
            .group = "Machine",
            .help = "Number of CPU threads (0: LibTorch's default)",
            .check = whole_number(0, most_threads()),
            .same_on_ranks = false})
      .add(&O::layout,
           {.name = "layout",
            .group = "Machine",
            .help = "Memory layout of images and convolution weights: auto, "
                    "the faster one on CUDA",
            .affects_costs = true})
      .add(&O::tf32,
           {.name = "tf32",
            .group = "Machine",
            .help = "Use TF32 for fp32 matrix products and convolutions on "
                    "CUDA; with bf16 and fp16 it is always used",
            .affects_costs = true})
      .add(&O::fp32_products,
           {.name = "fp32-products",
            .group = "Machine",
            .help = "Matrix products in fp32 on CUDA: auto, on tensor cores if "
                    "that is as exact; library, cuBLAS",
            .affects_costs = true})
      .add(&O::half_products,
           {.name = "half-products",
            .group = "Machine",
            .help = "Matrix products in bf16 and fp16 on CUDA: auto, with the "
                    "fastest of cuBLAS' algorithms, which may be another one "
                    "in the next run; library, as LibTorch chooses",
            .affects_costs = true})
      .add(&O::autotune,
           {.name = "autotune",
            .group = "Machine",
            .help = "Let cuDNN try its algorithms, which takes more memory: "
                    "auto, if that makes the micro-step faster",
            .affects_costs = true})
      .add(&O::graph,
           {.name = "graph",
            .group = "Machine",
            .help = "Run the micro-step as a CUDA graph: auto, on CUDA if it "
                    "can be captured",
            .affects_costs = true})
      .add_bytes(&O::memory_limit,
                 {.name = "memory",
                  .group = "Machine",
                  .help = "Budget for the peak, such as 8GiB; with "
                          "--global-batch alone the micro-batch is chosen too. "
                          "KiB, MiB and GiB are powers of 1024, kB, MB and GB "
                          "powers of 1000",
                  .check = byte_size(1),
                  .unset = "0"});
}

void add_ranks(Options& table) {
  table
      .add(&O::ranks, {.name = "ranks",
                       .group = "Ranks",
                       .help = "Number of processes",
                       .check = whole_number(1, 4096),
                       .affects_costs = true,
                       .on_command_line = false})
      .add(&O::shard,
           {.name = "shard",
            .group = "Ranks",
            .help =
                "What is divided among the ranks instead of replicated; each "
                "includes those before it",
            .affects_costs = true})
      .add(&O::shard_group,
           {.name = "shard-group",
            .group = "Ranks",
            .help = "Consecutive ranks that share one copy of what --shard "
                    "divides, such as those of one machine (0: all ranks)",
            .check = whole_number(0, 4096),
            .affects_costs = true})
      .add(&O::reduce, {.name = "reduce",
                        .group = "Ranks",
                        .help = "Type in which ranks exchange gradients",
                        .same_on_resume = true})
      .add_bytes(&O::bucket_bytes,
                 {.name = "bucket",
                  .group = "Ranks",
                  .help = "Size of the gradients that are reduced together",
                  .check = byte_size(kLeastBucket)})
      .add(&O::sync_norm,
           {.name = "sync-norm",
            .group = "Ranks",
            .help = "Compute BatchNorm's mean and variance over the "
                    "micro-batches of all ranks; runs without a CUDA graph",
            .same_on_resume = true,
            .affects_costs = true});
}

void add_saving(Options& table) {
  table
      .add(&O::save_every,
           {.name = "save-every",
            .group = "Saving",
            .help = "Updates between saved states (0: every ten minutes)",
            .check = whole_number(0, kMostUpdates),
            .in_studies = false,
            .needs_run_directory = true})
      .add(&O::keep, {.name = "keep",
                      .group = "Saving",
                      .help = "Number of saved states kept",
                      .check = whole_number(1, 1000),
                      .same_on_ranks = false,
                      .in_studies = false,
                      .needs_run_directory = true})
      .add(&O::tensorboard,
           {.name = "tensorboard",
            .group = "Saving",
            .help = "Write TensorBoard event files into the run directory",
            .same_on_ranks = false,
            .in_studies = false,
            .needs_run_directory = true});
}

}  // namespace

const FieldTable<TrainOptions>& option_fields() {
  static const Options table = [] {
    Options fields;
    add_loading(fields);
    add_batches(fields);
    add_memory(fields);
    add_optimization(fields);
    add_length(fields);
    add_machine(fields);
    add_ranks(fields);
    add_saving(fields);
    return fields;
  }();
  return table;
}

}  // namespace reprise
