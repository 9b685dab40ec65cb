#include "train_flags.h"

#include "checks.h"
#include "config_options.h"
#include "errors.h"

#include <reprise/base/bytes.h>

#include <fmt/format.h>

#include <algorithm>
#include <set>

namespace reprise::command {

namespace {

CLI::Option* add(CLI::App& train, const char* group, const char* flag,
                 auto& value, const char* text) {
  return train.add_option(flag, value, text)
      ->group(group)
      ->capture_default_str();
}

void add_rank_flags(CLI::App& train, TrainFlags& flags) {
  constexpr const char* kGroup = "Ranks";
  TrainConfig& c = flags.config;
  add(train, kGroup, "--shard", c.shard,
      "optimizer: each rank keeps its share of the optimizer's state only");
  add(train, kGroup, "--reduce", c.reduce,
      "Type in which gradients travel between ranks: fp32, bf16");
  add(train, kGroup, "--bucket", flags.bucket,
      "Bytes of gradients that travel together, such as 25MiB (the default)");
  train
      .add_flag("--sync-norm", c.sync_norm,
                "BatchNorm's mean and variance over the micro-batches of all "
                "ranks; runs without a CUDA graph")
      ->group(kGroup);
  set_check(
      add(train, kGroup, "--backend", flags.backend,
          "gloo or nccl (default: nccl on CUDA if each rank has a device of "
          "its own, else gloo)"),
      one_of({"gloo", "nccl"}));
  set_check(add(train, kGroup, "--rank-timeout", flags.rank_timeout_s,
                "Seconds without a sign of life after which a rank counts as "
                "gone"),
            real_number(0.5, 1e9));
}

void add_saving_flags(CLI::App& train, TrainFlags& flags) {
  constexpr const char* kGroup = "Saving";
  TrainConfig& c = flags.config;
  set_check(add(train, kGroup, "--out", flags.out,
                "Run directory (default: reprise-runs/MODEL-DATE-TIME); none: "
                "save nothing"),
            not_empty());
  add(train, kGroup, "--save-every", c.save_every,
      "Updates between saved states (0: every ten minutes)");
  add(train, kGroup, "--keep", c.keep, "Number of states kept");
  set_check(add(train, kGroup, "--resume", flags.resume,
                "Continue the run in this directory"),
            not_empty());
  set_check(add(train, kGroup, "--export", flags.export_path,
                "Write the weights to this safetensors file at the end"),
            writable_file());
  train
      .add_flag("--tensorboard", c.tensorboard,
                "Write TensorBoard event files into the run directory")
      ->group(kGroup);
}

}  // namespace

CLI::App* add_train_flags(CLI::App& app, TrainFlags& flags) {
  TrainConfig& c = flags.config;
  CLI::App* train = add_configured(
      app, "train", "Train a model on real data inside a memory budget", c);
  add(*train, "Evaluation", "--eval-every", c.eval_every,
      "Updates between evaluations (0: at the end of each epoch)");
  train->add_flag("--no-eval", flags.no_eval, "Do not evaluate")
      ->group("Evaluation");
  add_graph_flag(*train, c);
  set_check(train
                ->add_option("--observe", flags.observe_ms,
                             "Record memory, utilisation, power and clock of "
                             "the device at this interval in milliseconds "
                             "(default 50)")
                ->group("Machine")
                ->expected(0, 1)
                ->default_str("50"),
            real_number(1, 60000));
  add_rank_flags(*train, flags);
  add_saving_flags(*train, flags);
  add_format_flag(*train, flags.format, "Summary as table or json");
  set_check(train
                ->add_option("--compare", flags.compare,
                             "Show two runs' summary.json as BEFORE and AFTER; "
                             "trains nothing")
                ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
                ->expected(2),
            readable_file());
  check_fields(*train);
  add_memory_flag(*train, flags.memory,
                  "Budget that the peak stays within, such as 8GiB; with "
                  "--global-batch alone the micro-batch is chosen for it too");
  return train;
}

void check_train_flags(const TrainFlags& flags, const CLI::App& train) {
  const auto refuse = [](const char* flag, const std::string& text) {
    throw CLI::ValidationError(flag, text);
  };
  const auto given = [&](const char* flag) { return train.count(flag) > 0; };
  if (flags.compare.size() == 1) {
    refuse("--compare", "expected 2 values, got 1");
  }
  if (flags.out == "none") {
    for (const char* flag : {"--tensorboard", "--save-every", "--keep"}) {
      if (given(flag)) refuse(flag, "needs a run directory, got --out none");
    }
  }
  if (!flags.resume.empty() && given("--out")) {
    refuse("--resume", "continues in its own directory; --out is for new runs");
  }
  if (flags.no_eval && given("--eval-every")) {
    refuse("--eval-every", "needs evaluation, got --no-eval as well");
  }
  if (!flags.backend.empty() && flags.backend == "nccl" &&
      flags.config.device == "cpu" && flags.resume.empty()) {
    refuse("--backend", "nccl needs --device cuda; use gloo on the CPU");
  }
}

void finish_train_flags(TrainFlags& flags, const CLI::App& train) {
  TrainConfig& config = flags.config;
  if (flags.no_eval) config.evaluate = false;
  if (!flags.memory.empty()) {
    // A run that had no limit, and so no plan, gets one now.
    const bool planned = config.memory_limit > 0;
    if (!planned && train.count("--recompute") == 0) config.recompute.clear();
    config.memory_limit = parse_bytes(flags.memory);
  }
  if (!flags.bucket.empty()) config.bucket_bytes = parse_bytes(flags.bucket);
  if (config.data.empty()) config.data = default_data(config);
  config.resolve();
}

TrainConfig parse_train_flags(const std::vector<std::string>& words,
                              int64_t ranks) {
  CLI::App app;
  TrainFlags flags;
  flags.config.ranks = ranks;
  CLI::App* train = add_train_flags(app, flags);
  // CLI11 takes them from the back.
  std::vector<std::string> reversed(words.rbegin(), words.rend());
  reversed.push_back("train");
  try {
    app.parse(std::move(reversed));
  } catch (const CLI::Success&) {  // --help
    throw;
  } catch (const CLI::ParseError& error) {
    throw CLI::ValidationError(parse_message(app, error));
  }
  check_train_flags(flags, *train);
  // A run that continues has its values in its directory.
  const bool whole = flags.resume.empty() && flags.compare.empty();
  if (whole) finish_train_flags(flags, *train);
  return flags.config;
}

std::vector<std::string> study_keys() {
  static const std::set<std::string> others = {
      "help",        "out",    "resume",  "export",
      "tensorboard", "format", "compare", "observe",
      "save-every",  "keep",   "backend", "rank-timeout"};
  CLI::App app;
  TrainFlags flags;
  const CLI::App* train = add_train_flags(app, flags);
  std::vector<std::string> keys = {"ranks"};  // see launch
  for (const CLI::Option* option : train->get_options()) {
    for (const auto& name : option->get_lnames()) {
      if (others.count(name) == 0) keys.push_back(name);
    }
  }
  return keys;
}

}  // namespace reprise::command
