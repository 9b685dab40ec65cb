#include <reprise/recompute/strategy.h>
#include <reprise/train/config.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <vector>

namespace reprise {
namespace {

using nlohmann::json;

void check_word(const std::string& value, const char* flag,
                const std::vector<std::string>& known) {
  if (std::find(known.begin(), known.end(), value) != known.end()) return;
  TORCH_CHECK(false, "[", flag, "] expected one of ",
              fmt::format("{}", fmt::join(known, ", ")), ", got '", value, "'");
}

void check_not_negative(double value, const char* flag) {
  TORCH_CHECK(value >= 0, "[", flag, "] expected 0 or more, got ", value);
}

/// How many parts of `size` hold `whole`; the last may be smaller.
int64_t parts(int64_t whole, int64_t size) {
  return (whole + size - 1) / size;
}

/// Every field once: `visit(name, field, identity)`. Fields with `identity` must
/// be equal in a run that continues another.
template <class Config, class Visit>
void for_each_field(Config& c, Visit&& visit) {
  visit("model", c.model, true);
  visit("depth", c.model_options.depth, true);
  visit("width", c.model_options.width, true);
  visit("heads", c.model_options.heads, true);
  visit("classes", c.model_options.classes, true);
  visit("vocab", c.model_options.vocab, true);
  visit("seq", c.model_options.seq, true);
  visit("image_size", c.model_options.image_size, true);
  visit("channels", c.model_options.channels, true);
  visit("norm", c.model_options.norm, true);
  visit("dropout", c.model_options.dropout, true);
  visit("weights", c.weights, false);
  visit("data", c.data, true);
  visit("random_samples", c.random_samples, true);
  visit("resize", c.resize, false);
  visit("layout", c.layout, false);
  visit("tf32", c.tf32, false);
  visit("fp32_products", c.fp32_products, false);
  visit("autotune", c.autotune, false);
  visit("workers", c.workers, false);
  visit("batch", c.batch, true);
  visit("accumulate", c.accumulate, true);
  visit("global_batch", c.global_batch, true);
  visit("ranks", c.ranks, false);
  visit("shard", c.shard, false);
  visit("reduce", c.reduce, true);
  visit("bucket_bytes", c.bucket_bytes, false);
  visit("sync_norm", c.sync_norm, true);
  visit("recompute", c.recompute, false);
  visit("graph", c.graph, false);
  visit("weight_copies", c.weight_copies, false);
  visit("host_memory", c.host_memory, false);
  visit("precision", c.precision, true);
  visit("loss_scale", c.loss_scale, true);
  visit("optimizer", c.optimizer.name, true);
  visit("momentum", c.optimizer.momentum, true);
  visit("nesterov", c.optimizer.nesterov, true);
  visit("beta1", c.optimizer.beta1, true);
  visit("beta2", c.optimizer.beta2, true);
  visit("eps", c.optimizer.eps, true);
  visit("weight_decay", c.optimizer.weight_decay, true);
  visit("quantize_embeddings", c.quantize_embeddings, true);
  visit("lr", c.rate.base, true);
  visit("lr_schedule", c.rate.schedule, true);
  visit("warmup", c.rate.warmup_steps, true);
  visit("lr_lowest", c.rate.lowest, true);
  visit("scale_lr", c.scale_lr, true);
  visit("base_batch", c.base_batch, true);
  visit("clip", c.clip, true);
  visit("steps", c.steps, false);
  visit("epochs", c.epochs, false);
  visit("seconds", c.seconds, false);
  visit("eval_every", c.eval_every, false);
  visit("evaluate", c.evaluate, false);
  visit("device", c.device, false);
  visit("memory_limit", c.memory_limit, false);
  visit("seed", c.seed, true);
  visit("threads", c.threads, false);
  visit("save_every", c.save_every, false);
  visit("keep", c.keep, false);
  visit("tensorboard", c.tensorboard, false);
}

void resolve_recompute(TrainConfig& c) {
  check_not_negative(static_cast<double>(c.memory_limit), "--memory");
  if (c.recompute.empty())
    c.recompute = c.memory_limit > 0 ? "optimal" : "none";
  if (is_schedule_text(c.recompute)) return;  // checked against the model
  if (c.recompute != "optimal") {
    c.recompute = Strategy::parse(c.recompute).to_text();
    return;
  }
  TORCH_CHECK(c.memory_limit > 0,
              "[--recompute] optimal needs --memory, the bytes that the peak "
              "may not pass");
}

void resolve_sizes(TrainConfig& c) {
  TORCH_CHECK(c.batch >= 0 && c.accumulate >= 0 && c.global_batch >= 0,
              "[--batch] expected sizes of 1 or more, got --batch ", c.batch,
              ", --accumulate ", c.accumulate, ", --global-batch ",
              c.global_batch);
  TORCH_CHECK(c.ranks >= 1, "[ranks] expected 1 or more, got ", c.ranks);
  TORCH_CHECK(c.global_batch == 0 || c.global_batch >= c.ranks,
              "[--global-batch] expected a sample for each of ", c.ranks,
              " ranks, got ", c.global_batch);
  if (c.plans_micro_batch()) return;
  if (c.global_batch == 0) {
    if (c.batch == 0) c.batch = 32;
    if (c.accumulate == 0) c.accumulate = 1;
    c.global_batch = c.batch * c.accumulate * c.ranks;
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

}  // namespace

int64_t TrainConfig::share() const {
  return parts(global_batch, ranks);
}

void TrainConfig::share_among(int64_t processes) {
  if (processes == ranks) return;
  ranks = processes;
  if (batch == 0 || global_batch == 0) return;
  batch = std::min(batch, share());
  accumulate = parts(share(), batch);
}

bool TrainConfig::plans_micro_batch() const {
  return recompute == "optimal" && global_batch > 0 && batch == 0 &&
         accumulate == 0;
}

void TrainConfig::resolve() {
  resolve_recompute(*this);
  resolve_sizes(*this);
  if (data.empty()) data = "random";
  // With a time alone there is nothing else to end it.
  if (steps == 0 && epochs == 0) epochs = seconds > 0 ? 1'000'000 : 1;
  TORCH_CHECK(steps == 0 || epochs == 0,
              "[--steps] expected either --steps or --epochs, got both");
  TORCH_CHECK(steps >= 0 && epochs >= 0,
              "[--steps] expected 1 or more, got --steps ", steps,
              ", --epochs ", epochs);
  check_word(precision, "--precision", {"fp32", "bf16", "fp16"});
  check_word(graph, "--graph", {"auto", "on", "off"});
  check_word(fp32_products, "--fp32-products", {"auto", "library"});
  check_word(weight_copies, "--weight-copies", {"auto", "on", "each", "off"});
  check_word(shard, "--shard", {"", "optimizer"});
  check_word(reduce, "--reduce", {"fp32", "bf16"});
  TORCH_CHECK(bucket_bytes > 0, "[--bucket] expected a size above 0, got ",
              bucket_bytes);
  check_word(host_memory, "--host-memory", {"auto", "off"});
  check_word(resize, "--resize", {"device", "workers"});
  check_word(layout, "--layout", {"planes", "channels-last"});
  check_word(scale_lr, "--scale-lr", {"", "linear", "sqrt"});
  check_word(rate.schedule, "--lr-schedule", {"constant", "cosine"});
  check_word(optimizer.name, "--optimizer", optimizer_names());
  TORCH_CHECK(
      !quantize_embeddings || optimizer.name.ends_with("8bit"),
      "[--quantize-embeddings] needs --optimizer adam8bit or adamw8bit, "
      "got ",
      optimizer.name);
  TORCH_CHECK(scale_lr.empty() || base_batch > 0,
              "[--scale-lr] needs --base-batch, the global batch that --lr was "
              "tuned for");
  TORCH_CHECK(random_samples > 0, "[--random-samples] expected 1 or more, got ",
              random_samples);
  TORCH_CHECK(keep > 0, "[--keep] expected 1 or more, got ", keep);
  TORCH_CHECK(loss_scale > 0, "[--loss-scale] expected more than 0, got ",
              loss_scale);
  check_not_negative(static_cast<double>(workers), "--workers");
  check_not_negative(static_cast<double>(threads), "--threads");
  check_not_negative(static_cast<double>(eval_every), "--eval-every");
  check_not_negative(static_cast<double>(save_every), "--save-every");
  check_not_negative(static_cast<double>(rate.warmup_steps), "--warmup");
  check_not_negative(rate.base, "--lr");
  check_not_negative(clip, "--clip");
  check_not_negative(seconds, "--seconds");
}

std::string to_json(const TrainConfig& config) {
  json result = json::object();
  for_each_field(config, [&](const char* name, const auto& field, bool) {
    result[name] = field;
  });
  return result.dump(2);
}

TrainConfig config_from_json(const std::string& text) {
  TrainConfig config;
  try {
    const json source = json::parse(text);
    // Runs that were saved before a field was there go on with its default.
    for_each_field(config, [&](const char* name, auto& field, bool identity) {
      if (identity || source.contains(name)) source.at(name).get_to(field);
    });
  } catch (const json::exception& error) {
    TORCH_CHECK(false, "[config] not a configuration of a run: ", error.what());
  }
  return config;
}

std::string conflict(const TrainConfig& saved, const TrainConfig& now) {
  // As the run would go on among as many processes as there are now.
  TrainConfig adapted = saved;
  adapted.share_among(now.ranks);
  const json before = json::parse(to_json(adapted));
  const json after = json::parse(to_json(now));
  std::string found;
  for_each_field(saved, [&](const char* name, const auto&, bool identity) {
    if (!identity || !found.empty() || before[name] == after[name]) return;
    found = fmt::format("{} was {}, now {}", name, before[name].dump(),
                        after[name].dump());
  });
  return found;
}

}  // namespace reprise
