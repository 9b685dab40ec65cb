#include "memory/host_tensors.h"
#include "train/config/update_refusal.h"
#include "train/optim/registry.h"

#include <reprise/data/dataset.h>
#include <reprise/models/registry.h>
#include <reprise/recompute/strategy.h>
#include <reprise/train/config.h>
#include <reprise/train/fields.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>

namespace reprise {
namespace {

constexpr const char* kOptimal = "optimal";
constexpr const char* kAuto = "auto";
constexpr const char* kRandom = "random";
/// Samples per update, as for --global-batch.
constexpr int64_t kMostInWindow = 1'000'000'000;

/// How many parts of `size` hold `whole`; the last may be smaller.
int64_t parts(int64_t whole, int64_t size) {
  return whole / size + (whole % size == 0 ? 0 : 1);
}

void check_optimizer(const TrainOptions& c) {
  using detail::OptimizerInfo;
  const OptimizerOptions& given = c.optimizer;
  const OptimizerOptions plain;
  const OptimizerInfo& info = detail::find_optimizer(given.name);
  const auto only_with = [&](bool OptimizerInfo::*property, bool is_default,
                             const char* flag) {
    TORCH_CHECK(info.*property || is_default, "[", flag, "] needs --optimizer ",
                detail::optimizers_with(property), ", got ", given.name);
  };
  only_with(&OptimizerInfo::has_momentum, given.momentum == plain.momentum,
            "--momentum");
  only_with(&OptimizerInfo::has_momentum, !given.nesterov, "--nesterov");
  TORCH_CHECK(!given.nesterov || given.momentum > 0,
              "[--nesterov] needs --momentum above 0, got ", given.momentum);
  only_with(&OptimizerInfo::has_betas, given.beta1 == plain.beta1, "--beta1");
  only_with(&OptimizerInfo::has_betas, given.beta2 == plain.beta2, "--beta2");
  only_with(&OptimizerInfo::has_betas, given.eps == plain.eps, "--eps");
  only_with(&OptimizerInfo::quantized, !c.quantize_embeddings,
            "--quantize-embeddings");
}

void check_rate(const TrainOptions& c) {
  TORCH_CHECK(c.scale_lr == LrScaling::kNone || c.base_batch > 0,
              "[--scale-lr] needs --base-batch, the global batch that --lr was "
              "tuned for");
  TORCH_CHECK(c.scale_lr != LrScaling::kNone || c.base_batch == 0,
              "[--base-batch] needs --scale-lr linear or sqrt");
  const bool cosine = c.rate.schedule == LrScheduleKind::kCosine;
  TORCH_CHECK(cosine || c.rate.lowest == 0,
              "[--lr-lowest] needs --lr-schedule cosine, got ",
              to_text(c.rate.schedule));
  TORCH_CHECK(c.rate.lowest <= c.rate.base,
              "[--lr-lowest] expected at most the --lr of ", c.rate.base,
              ", got ", c.rate.lowest);
  TORCH_CHECK(!cosine || c.steps == 0 || c.rate.warmup_steps < c.steps,
              "[--warmup] expected fewer than the --steps of ", c.steps,
              " with --lr-schedule cosine, got ", c.rate.warmup_steps);
}

void check_lora(const TrainConfig& c) {
  TORCH_CHECK(c.lora.rank == 0 || c.adapter.empty(),
              "[--lora] expected either --lora or --adapter, which has its own "
              "rank, got both");
  const LoraOptions plain;
  const auto needs_rank = [&](bool is_default, const char* flag) {
    TORCH_CHECK(c.lora.rank > 0 || is_default, "[", flag,
                "] needs --lora, the rank of the adapters");
  };
  needs_rank(c.lora.alpha == plain.alpha, "--lora-alpha");
  needs_rank(c.lora.targets.empty(), "--lora-targets");
  needs_rank(c.lora.dropout == plain.dropout, "--lora-dropout");
}

void check_documents(const TrainConfig& c) {
  const bool whole = c.documents != DocumentMode::kStream;
  TORCH_CHECK(!whole || c.document_end >= 0, "[--documents] ",
              to_text(c.documents),
              " needs --document-end, the last token of each document");
  TORCH_CHECK(whole || c.document_end < 0,
              "[--document-end] needs padded or packed --documents");
  TORCH_CHECK(!whole || (!c.data.empty() && find_dataset(c.data) == nullptr),
              "[--documents] ", to_text(c.documents),
              " needs a file of text or tokens as --data");
}

void resolve_recompute(TrainOptions& c) {
  if (c.recompute.empty() || c.recompute == kAuto) {
    c.recompute = c.memory_limit > 0             ? kOptimal
                  : c.device.starts_with("cuda") ? kAuto
                                                 : "none";
  }
  if (c.plans_if_long()) return;
  if (is_schedule_text(c.recompute)) return;  // checked against the model
  if (!c.plans_schedule()) {
    c.recompute = Strategy::parse(c.recompute).to_text();
    return;
  }
  TORCH_CHECK(c.memory_limit > 0,
              "[--recompute] optimal needs --memory, the bytes that the peak "
              "may not pass");
}

void resolve_sizes(TrainOptions& c) {
  TORCH_CHECK(c.global_batch == 0 || c.global_batch >= c.ranks,
              "[--global-batch] expected a sample for each of ", c.ranks,
              " ranks, got ", c.global_batch);
  if (c.plans_micro_batch()) return;
  if (c.global_batch == 0) {
    if (c.batch == 0) c.batch = 32;
    if (c.accumulate == 0) c.accumulate = 1;
    // Each is at most 2^24.
    const int64_t samples = c.batch * c.accumulate;
    TORCH_CHECK(
        samples <= kMostInWindow / c.ranks, "[--batch] expected at most ",
        kMostInWindow, " samples per update, got ", c.batch, " × ",
        c.accumulate,
        c.ranks > 1 ? fmt::format(" on {} ranks", c.ranks) : std::string());
    c.global_batch = samples * c.ranks;
    return;
  }
  const int64_t share = c.share();
  const std::string whose =
      c.ranks > 1 ? fmt::format(" of each of {} ranks", c.ranks) : "";
  if (c.batch == 0) {
    c.batch = parts(share, std::max<int64_t>(c.accumulate, 1));
  }
  TORCH_CHECK(c.batch <= share, "[--batch] expected at most the ", share,
              " samples of --global-batch", whose, ", got ", c.batch);
  const int64_t needed = parts(share, c.batch);
  if (c.accumulate == 0) c.accumulate = needed;
  TORCH_CHECK(c.accumulate == needed, "[--global-batch] ", share, " samples",
              whose, " are ", needed, " micro-batches of ", c.batch,
              ", not --accumulate ", c.accumulate);
}

void check_update(const TrainOptions& c) {
  if (c.update != UpdateMode::kBackward) return;
  const std::string reason = detail::update_refusal(c);
  TORCH_CHECK(reason.empty(), "[--update] backward: ", reason,
              "; use --update after");
  TORCH_CHECK(c.accumulate <= 1 || detail::updates_in_last(c),
              "[--update] backward needs one micro-batch per update, got ",
              c.accumulate, "; use --update after or --accumulate 1");
}

void check_state(const TrainOptions& c) {
  if (!detail::state_on_host(c.state)) return;
  const std::string reason = c.state == StatePlace::kHost
                                 ? detail::state_refusal(c)
                                 : detail::parameters_refusal(c);
  TORCH_CHECK(reason.empty(), "[--state] ", to_text(c.state), ": ", reason,
              "; use --state device");
}

/// Why the weights cannot be in bfloat16; empty if they can.
std::string half_parameters_refusal(const TrainOptions& c) {
  if (c.precision != Precision::kBf16) return "it needs --precision bf16";
  if (c.ranks > 1) return "several ranks exchange parameters in fp32";
  if (c.weight_copies == WeightCopiesMode::kOff) {
    return "--weight-copies off adds up gradients in the type of the weights";
  }
  const std::string& name = c.optimizer.name;
  if (name != "adam" && name != "adamw" && name != "sgd") {
    return fmt::format(
        "--optimizer {} rounds to nearest; use adamw, adam or "
        "sgd",
        name);
  }
  return "";
}

void check_parameters(const TrainOptions& c) {
  if (c.parameters == ParameterType::kFp32) return;
  const std::string reason = half_parameters_refusal(c);
  TORCH_CHECK(reason.empty(), "[--parameters] ", to_text(c.parameters), ": ",
              reason, "; or use --parameters fp32");
}

void check_shard_group(const TrainOptions& c) {
  if (c.shard_group == 0) return;
  TORCH_CHECK(c.shard != Sharding::kNone,
              "[--shard-group] needs --shard optimizer, gradients or "
              "parameters");
  TORCH_CHECK(c.ranks % c.shard_group == 0,
              "[--shard-group] expected a divisor of ", c.ranks, " ranks, got ",
              c.shard_group);
}

void check_gradients(const TrainOptions& c) {
  if (c.gradients == GradientSums::kFp32) return;
  const std::string reason = detail::gradients_refusal(c);
  TORCH_CHECK(reason.empty(), "[--gradients] ", to_text(c.gradients), ": ",
              reason, "; use --gradients fp32");
}

}  // namespace

std::string detail::state_refusal(const TrainOptions& c) {
  if (c.host_memory == "off") {
    return "--host-memory off forbids it";
  }
  if (c.parameters == ParameterType::kBf16) {
    return "--parameters bf16 is updated on the device";
  }
  if (!HostTensorsOnCpu::active() && torch::Device(c.device).is_cpu()) {
    return "the device is the CPU, whose memory is that of the host";
  }
  return "";
}

std::string detail::update_refusal(const TrainOptions& c) {
  if (c.clip > 0) {
    return "--clip needs the norm of all gradients before the first update";
  }
  if (c.precision == Precision::kFp16) {
    return "fp16 skips an update if any of its gradients overflows";
  }
  if (c.ranks > 1) return "several ranks add up their gradients first";
  return "";
}

std::string detail::gradients_refusal(const TrainOptions& c) {
  if (c.update == UpdateMode::kAfter) {
    return "--update after needs all gradients in full precision";
  }
  if (c.state == StatePlace::kHostAll) {
    return "--state host-all adds up gradients in host memory";
  }
  if (c.parameters == ParameterType::kBf16) {
    return "--parameters bf16 has exact gradients";
  }
  return update_refusal(c);
}

std::string detail::parameters_refusal(const TrainOptions& c) {
  if (const auto reason = state_refusal(c); !reason.empty()) return reason;
  if (c.shard != Sharding::kNone) {
    return "with --shard, ranks have their parameters on the device";
  }
  if (c.gradients == GradientSums::kBf16) {
    return "--gradients bf16 adds up gradients on the device";
  }
  if (c.update == UpdateMode::kAfter) {
    return "--update after needs all gradients on the device";
  }
  if (c.weight_copies == WeightCopiesMode::kOn ||
      c.weight_copies == WeightCopiesMode::kSplit) {
    return fmt::format("--weight-copies {} needs all weights on the device",
                       to_text(c.weight_copies));
  }
  return update_refusal(c);
}

int64_t TrainOptions::sharing_ranks() const {
  if (shard == Sharding::kNone) return 1;
  return shard_group > 0 ? shard_group : ranks;
}

int64_t TrainOptions::share() const {
  return parts(global_batch, ranks);
}

void TrainOptions::share_among(int64_t processes) {
  if (processes == ranks) return;
  ranks = processes;
  if (shard_group > 0 && ranks % shard_group != 0) shard_group = 0;
  // Values that are not allowed are reported later, by resolve().
  if (batch <= 0 || global_batch <= 0) return;
  batch = std::min(batch, share());
  accumulate = parts(share(), batch);
}

bool TrainOptions::plans_schedule() const {
  return recompute == kOptimal;
}

bool TrainOptions::plans_if_long() const {
  return recompute == kAuto;
}

bool TrainOptions::plans_micro_batch() const {
  return plans_schedule() && global_batch > 0 && batch == 0 && accumulate == 0;
}

void TrainOptions::resolve() {
  option_fields().check(*this);
  check_optimizer(*this);
  check_rate(*this);
  resolve_recompute(*this);
  resolve_sizes(*this);
  check_update(*this);
  check_shard_group(*this);
  check_state(*this);
  check_gradients(*this);
  check_parameters(*this);
  TORCH_CHECK(steps == 0 || epochs == 0,
              "[--steps] expected either --steps or --epochs, got both");
  // A run that is limited by time alone must not end earlier.
  if (steps == 0 && epochs == 0) epochs = seconds > 0 ? 1'000'000 : 1;
}

void TrainConfig::resolve() {
  config_fields().check(*this);
  check_lora(*this);
  check_documents(*this);
  // Recorded with their defaults, which may change while the run is interrupted.
  model_options.own = resolve_options(model, model_options).own;
  TrainOptions::resolve();
  if (data.empty()) data = kRandom;
}

bool TrainConfig::is_random_data() const {
  return data == kRandom;
}

std::string to_json(const TrainOptions& options) {
  return option_fields().to_json(options);
}

TrainOptions options_from_json(const std::string& text) {
  return option_fields().from_json(text);
}

std::string to_json(const TrainConfig& config) {
  return config_fields().to_json(config);
}

TrainConfig config_from_json(const std::string& text) {
  return config_fields().from_json(text);
}

std::string conflict(const TrainConfig& saved, const TrainConfig& now) {
  // Windows are the same whatever the number of processes.
  TrainConfig adapted = saved;
  adapted.share_among(now.ranks);
  return config_fields().conflict(adapted, now);
}

}  // namespace reprise
