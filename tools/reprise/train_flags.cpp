#include "train_flags.h"

#include "base/text_check.h"
#include "checks.h"
#include "errors.h"

namespace reprise::command {

namespace {

void add_rank_flags(CLI::App& train, TrainFlags& flags) {
  constexpr const char* kGroup = "Ranks";
  add_choice(train, "--backend", flags.backend,
             "Library that connects the ranks: auto, nccl on CUDA if each rank "
             "has its own device, else gloo")
      ->group(kGroup);
  set_check(train
                .add_option("--rank-timeout", flags.rank_timeout_s,
                            "Seconds without a heartbeat after which a rank "
                            "counts as lost")
                ->group(kGroup)
                ->capture_default_str(),
            real_number(0.5, 1e9));
}

void add_saving_flags(CLI::App& train, TrainFlags& flags) {
  const auto add = [&](const char* flag, std::string& value, const char* kind,
                       const char* text) {
    return train.add_option(flag, value, text)
        ->group("Saving")
        ->type_name(kind);
  };
  CLI::Option* out =
      add("--out", flags.out, "DIR",
          "Run directory (default: reprise-runs/MODEL-DATE-TIME); none: save "
          "nothing");
  set_check(out, not_empty());
  set_words(out, names_of<OutKeyword>());
  set_check(add("--resume", flags.resume, "DIR",
                "Continue the run in this directory"),
            not_empty());
  set_check(add("--export", flags.export_path, "PATH",
                "Write the weights to this safetensors file at the end, or to "
                "files of at most 5 GB if it ends in .safetensors.index.json; "
                "with --lora, the adapter to this directory, unless it ends "
                "in one of these"),
            writable_export());
}

}  // namespace

bool TrainFlags::saves_nothing() const {
  return try_from_text<OutKeyword>(out) == OutKeyword::kNone;
}

CLI::App* add_train_flags(CLI::App& app, TrainFlags& flags) {
  CLI::App* train = add_configured(
      app, "train", "Train a model on real data inside a memory budget",
      flags.config);
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
  add_format_flag(*train, flags.format, "Format of the summary");
  set_check(train
                ->add_option("--compare", flags.compare,
                             "Compare the summary.json of two runs, BEFORE and "
                             "AFTER, and train nothing")
                ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
                ->type_name("FILE")
                ->expected(2),
            readable_file());
  return train;
}

void check_train_flags(const TrainFlags& flags, const CLI::App& train) {
  const auto refuse = [](const std::string& flag, const std::string& text) {
    throw CLI::ValidationError(flag, text);
  };
  const auto given = [&](const std::string& flag) {
    return train.count(flag) > 0;
  };
  if (flags.compare.size() == 1) {
    refuse("--compare", "expected 2 values, got 1");
  }
  if (flags.saves_nothing()) {
    for (const auto& name :
         option_fields().names(&FieldInfo::needs_run_directory)) {
      if (given("--" + name)) {
        refuse("--" + name, "needs a run directory, got --out none");
      }
    }
  }
  if (!flags.resume.empty() && given("--out")) {
    refuse("--resume", "continues in its own directory; --out is for new runs");
  }
  const bool adapts =
      flags.config.lora.rank > 0 || !flags.config.adapter.empty();
  if (given("--export") && flags.resume.empty() && !adapts) {
    const std::string why = writable_file()(flags.export_path);
    if (!why.empty()) refuse("--export", why);
  }
  if (!flags.config.evaluate && given("--eval-every")) {
    refuse("--eval-every", "needs evaluation, got --no-eval as well");
  }
  if (flags.backend == Backend::kNccl && flags.resume.empty() &&
      torch::Device(flags.config.device).is_cpu()) {
    refuse("--backend", "nccl needs --device cuda; use gloo on the CPU");
  }
}

void finish_train_flags(TrainFlags& flags) {
  TrainConfig& config = flags.config;
  if (config.data.empty()) config.data = default_data(config);
  config.resolve();
}

TrainConfig parse_train_flags(const std::vector<std::string>& words,
                              int64_t ranks) {
  CLI::App app;
  TrainFlags flags;
  flags.config.ranks = ranks;
  CLI::App* train = add_train_flags(app, flags);
  // CLI11 expects the arguments in reverse order.
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
  // A resumed run takes its other values from its directory.
  const bool whole = flags.resume.empty() && flags.compare.empty();
  if (whole) finish_train_flags(flags);
  return flags.config;
}

}  // namespace reprise::command
