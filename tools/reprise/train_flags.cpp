#include "train_flags.h"

#include "config_options.h"

#include <reprise/memory/bytes.h>

#include <algorithm>
#include <set>

namespace reprise::command {

CLI::App* add_train_flags(CLI::App& app, TrainFlags& flags) {
  TrainConfig& c = flags.config;
  CLI::App* train = add_configured(
      app, "train", "Train a model on real data inside a memory budget", c);
  const auto option = [&](const char* group, const char* flag, auto& value,
                          const char* text) {
    return train->add_option(flag, value, text)
        ->group(group)
        ->capture_default_str();
  };
  option("Evaluation", "--eval-every", c.eval_every,
         "Updates between evaluations (0: at the end of each epoch)");
  train->add_flag("--no-eval", flags.no_eval, "Do not evaluate")
      ->group("Evaluation");
  option("Machine", "--memory", flags.memory,
         "Budget that the peak stays within, such as 8GiB; with --global-batch "
         "alone the micro-batch is chosen for it too");
  add_graph_flag(*train, c);
  train
      ->add_option("--observe", flags.observe_ms,
                   "Look at the device every so many milliseconds (default "
                   "50): memory, utilisation, power, clock")
      ->group("Machine")
      ->expected(0, 1)
      ->default_str("50")
      ->check(CLI::Range(1.0, 60000.0));
  option("Ranks", "--shard", c.shard,
         "optimizer: each rank keeps its share of the optimizer's state only");
  option("Ranks", "--reduce", c.reduce,
         "As what gradients travel between ranks: fp32, bf16");
  option("Ranks", "--bucket", flags.bucket,
         "Gradients that travel together, such as 25MiB (the default)");
  train
      ->add_flag("--sync-norm", c.sync_norm,
                 "BatchNorm's mean and variance over the micro-batches of all "
                 "ranks; runs without a CUDA graph")
      ->group("Ranks");
  option("Ranks", "--backend", flags.backend,
         "gloo or nccl (default: nccl on CUDA where each rank has a device of "
         "its own, else gloo)");
  option(
      "Ranks", "--rank-timeout", flags.rank_timeout_s,
      "Seconds without a sign of life after which a rank counts as gone; 0.5 "
      "or more")
      ->check(CLI::Range(0.5, 1e9));
  option("Saving", "--out", flags.out,
         "Run directory (default: reprise-runs/MODEL-DATE-TIME); none: save "
         "nothing");
  option("Saving", "--save-every", c.save_every,
         "Updates between saved states (0: every ten minutes)");
  option("Saving", "--keep", c.keep, "States kept");
  option("Saving", "--resume", flags.resume,
         "Continue the run in this directory");
  option("Saving", "--export", flags.export_path,
         "Write the weights to this safetensors file at the end");
  train
      ->add_flag("--tensorboard", c.tensorboard,
                 "Write TensorBoard event files into the run directory")
      ->group("Saving");
  train->add_option("--format", flags.format, "Summary as table or json")
      ->check(CLI::IsMember({"table", "json"}))
      ->capture_default_str();
  train
      ->add_option("--compare", flags.compare,
                   "Show two runs' summary.json as BEFORE and AFTER; trains "
                   "nothing")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->expected(2);
  return train;
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
  app.parse(std::move(reversed));
  finish_train_flags(flags, *train);
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
