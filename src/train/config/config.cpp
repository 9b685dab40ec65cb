#include <reprise/recompute/strategy.h>
#include <reprise/train/config.h>
#include <reprise/train/field_check.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <set>
#include <string_view>

namespace reprise {
namespace {

using nlohmann::json;

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

/// As on the command line: "--image-size" for image_size.
std::string flag_of(std::string_view field) {
  if (field == "memory_limit") return "--memory";
  if (field == "bucket_bytes") return "--bucket";
  std::string flag = "--" + std::string(field);
  std::replace(flag.begin(), flag.end(), '_', '-');
  return flag;
}

/// Fields in which 0 stands for a value that was not given.
bool zero_is_unset(std::string_view field) {
  static const std::set<std::string_view> fields = {
      "depth",      "width",      "heads",    "classes",      "vocab",
      "seq",        "image_size", "channels", "batch",        "accumulate",
      "base_batch", "steps",      "epochs",   "memory_limit", "global_batch"};
  return fields.count(field) > 0;
}

bool is_unset(std::string_view, const std::string& field) {
  return field.empty();
}
bool is_unset(std::string_view name, double field) {
  return name == "dropout" && field < 0;
}
template <class Whole>
bool is_unset(std::string_view name, Whole field) {
  return field == Whole{} && zero_is_unset(name);
}

void check_fields(const TrainConfig& config) {
  for_each_field(config, [](std::string_view name, const auto& field, bool) {
    const std::string flag = flag_of(name);
    const FieldCheck* check = field_check(flag);
    if (check == nullptr || is_unset(name, field)) return;
    const std::string error = (*check)(fmt::format("{}", field));
    TORCH_CHECK(error.empty(), "[", flag, "] ", error);
  });
}

void check_optimizer(const TrainConfig& c) {
  const OptimizerOptions& given = c.optimizer;
  const OptimizerOptions plain;
  const bool sgd = given.name == "sgd";
  const bool adam = given.name.starts_with("adam");
  const auto only_with = [&](bool fine, const char* flag, const char* names) {
    TORCH_CHECK(fine, "[", flag, "] needs --optimizer ", names, ", got ",
                given.name);
  };
  only_with(sgd || given.momentum == 0, "--momentum", "sgd");
  only_with(sgd || !given.nesterov, "--nesterov", "sgd");
  TORCH_CHECK(!given.nesterov || given.momentum > 0,
              "[--nesterov] needs --momentum above 0, got ", given.momentum);
  const char* adams = "adam, adamw, adam8bit or adamw8bit";
  only_with(adam || given.beta1 == plain.beta1, "--beta1", adams);
  only_with(adam || given.beta2 == plain.beta2, "--beta2", adams);
  only_with(given.name.ends_with("8bit") || !c.quantize_embeddings,
            "--quantize-embeddings", "adam8bit or adamw8bit");
}

void check_rate(const TrainConfig& c) {
  TORCH_CHECK(c.scale_lr.empty() || c.base_batch > 0,
              "[--scale-lr] needs --base-batch, the global batch that --lr was "
              "tuned for");
  TORCH_CHECK(!c.scale_lr.empty() || c.base_batch == 0,
              "[--base-batch] needs --scale-lr linear or sqrt");
  const bool cosine = c.rate.schedule == "cosine";
  TORCH_CHECK(cosine || c.rate.lowest == 0,
              "[--lr-lowest] needs --lr-schedule cosine, got ",
              c.rate.schedule);
  TORCH_CHECK(c.rate.lowest <= c.rate.base,
              "[--lr-lowest] expected at most the --lr of ", c.rate.base,
              ", got ", c.rate.lowest);
  TORCH_CHECK(!cosine || c.steps == 0 || c.rate.warmup_steps < c.steps,
              "[--warmup] expected fewer than the --steps of ", c.steps,
              " with --lr-schedule cosine, got ", c.rate.warmup_steps);
}

void resolve_recompute(TrainConfig& c) {
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
  check_fields(*this);
  check_optimizer(*this);
  check_rate(*this);
  resolve_recompute(*this);
  resolve_sizes(*this);
  if (data.empty()) data = "random";
  TORCH_CHECK(steps == 0 || epochs == 0,
              "[--steps] expected either --steps or --epochs, got both");
  // With a time alone there is nothing else to end it.
  if (steps == 0 && epochs == 0) epochs = seconds > 0 ? 1'000'000 : 1;
}

std::string to_json(const TrainConfig& config) {
  json result = json::object();
  for_each_field(config, [&](const char* name, const auto& field, bool) {
    result[name] = field;
  });
  return result.dump(2);
}

TrainConfig config_from_json(const std::string& text) {
  const json source = json::parse(text, nullptr, /*allow_exceptions=*/false);
  TORCH_CHECK(source.is_object(),
              "[config] expected the configuration of a run as a JSON object, "
              "got something else; the file is corrupt or of another program");
  TrainConfig config;
  std::string at;
  try {
    // Runs that were saved before a field was there go on with its default.
    for_each_field(config, [&](const char* name, auto& field, bool identity) {
      at = name;
      if (identity || source.contains(name)) source.at(name).get_to(field);
    });
  } catch (const json::exception&) {
    TORCH_CHECK(false, "[config] expected the configuration of a run, got one ",
                source.contains(at) ? "with another type of '" : "without '",
                at, "'");
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
