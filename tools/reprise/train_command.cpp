#include "commands.h"
#include "config_options.h"
#include "progress.h"

#include <reprise/data/file.h>
#include <reprise/memory/bytes.h>
#include <reprise/train/trainer.h>

#include <fmt/format.h>

#include <atomic>
#include <csignal>
#include <ctime>
#include <iostream>
#include <memory>
#include <optional>

namespace reprise::command {
namespace {

std::atomic<bool> stop_asked = false;

/// A second signal ends the process at once: the handler is gone by then.
extern "C" void on_signal(int number) {
  stop_asked = true;
  std::signal(number, SIG_DFL);
}

struct Flags {
  TrainConfig config;
  std::string memory;
  std::string out;
  std::string resume;
  std::string export_path;
  std::string format = "table";
  std::vector<std::string> compare;
  bool no_eval = false;
};

std::string default_directory(const TrainConfig& config) {
  const std::time_t now = std::time(nullptr);
  char when[32];
  std::strftime(when, sizeof when, "%Y%m%d-%H%M%S", std::localtime(&now));
  return fmt::format("reprise-runs/{}-{}", config.model, when);
}

/// Puts the configuration of the run in `saved` in the place of the defaults:
/// flags that were given stand above it, as long as it stays the same training.
void continue_from(const TrainConfig& saved, CLI::App& app,
                   TrainConfig& config) {
  config = saved;
  for (CLI::Option* option : app.get_options()) {
    // Hands the values that were read to the variable once more.
    if (option->count() > 0) option->run_callback();
  }
  if (app.count("--steps") > app.count("--epochs")) config.epochs = 0;
  if (app.count("--epochs") > app.count("--steps")) config.steps = 0;
  const std::string what = conflict(saved, config);
  TORCH_CHECK(what.empty(), "[--resume] that would be another training: ", what,
              "; start a new one with --out");
}

int compare_runs(const std::vector<std::string>& paths) {
  const auto before = summary_from_json(read_text(paths.at(0)));
  const auto after = summary_from_json(read_text(paths.at(1)));
  std::cout << compare(before, after);
  return 0;
}

int report(const Flags& flags, const TrainResult& result,
           const std::string& directory) {
  if (flags.format == "json") {
    std::cout << to_json(result.summary) << std::endl;
  } else {
    std::cout << to_table(result.summary) << std::flush;
  }
  if (result.stopped) {
    if (directory.empty()) {
      std::cerr << "stopped; nothing was saved, since --out is none\n";
    } else {
      std::cerr << "stopped; go on with: reprise train --resume " << directory
                << "\n";
    }
  }
  return result.save_failed ? 1 : 0;
}

int train_with(Flags& flags, CLI::App& app) {
  if (!flags.compare.empty()) return compare_runs(flags.compare);
  TrainConfig& config = flags.config;
  std::optional<RunDirectory> directory;
  if (!flags.resume.empty()) {
    TORCH_CHECK(flags.out.empty(),
                "[--resume] continues in its own directory; --out is for new "
                "runs");
    directory.emplace(RunDirectory::open(flags.resume));
    continue_from(directory->config(), app, config);
  }
  if (flags.no_eval) config.evaluate = false;
  if (!flags.memory.empty()) {
    // A run that had no limit, and so no plan, gets one now.
    const bool planned = config.memory_limit > 0;
    if (!planned && app.count("--recompute") == 0) config.recompute.clear();
    config.memory_limit = parse_bytes(flags.memory);
  }
  if (config.data.empty()) config.data = default_data(config);
  config.resolve();
  PlanningOptions planning;
  planning.progress = [](const std::string& text) {
    fmt::print(stderr, "{}\n", text);
  };
  // Whatever is wrong shows before a file is touched.
  Training training(config, nullptr, planning);
  if (!flags.resume.empty()) {
    directory->set_config(config);
  } else if (flags.out != "none") {
    const std::string path =
        flags.out.empty() ? default_directory(config) : flags.out;
    directory.emplace(RunDirectory::create(path, config));
  }

  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
  TrainResult result;
  {
    Progress progress;
    TrainRun run;
    run.directory = directory ? &*directory : nullptr;
    run.resume = !flags.resume.empty();
    run.listener = &progress;
    run.stop = [] { return stop_asked.load(); };
    run.export_path = flags.export_path;
    if (config.tensorboard) {
      run.tensorboard =
          (directory ? directory->path() + "/" : "") + "tensorboard";
    }
    result = training.run(run);
  }
  if (directory) {
    AtomicFile file(directory->path() + "/summary.json");
    file.write(to_json(result.summary) + "\n");
    file.commit();
  }
  return report(flags, result, directory ? directory->path() : "");
}

}  // namespace

void add_train(CLI::App& app, Action& action) {
  auto flags = std::make_shared<Flags>();
  TrainConfig& c = flags->config;
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
  train->add_flag("--no-eval", flags->no_eval, "Do not evaluate")
      ->group("Evaluation");
  option("Machine", "--memory", flags->memory,
         "Budget that the peak stays within, such as 8GiB; with --global-batch "
         "alone the micro-batch is chosen for it too");
  option("Saving", "--out", flags->out,
         "Run directory (default: reprise-runs/MODEL-DATE-TIME); none: save "
         "nothing");
  option("Saving", "--save-every", c.save_every,
         "Updates between saved states (0: every ten minutes)");
  option("Saving", "--keep", c.keep, "States kept");
  option("Saving", "--resume", flags->resume,
         "Continue the run in this directory");
  option("Saving", "--export", flags->export_path,
         "Write the weights to this safetensors file at the end");
  train
      ->add_flag("--tensorboard", c.tensorboard,
                 "Write TensorBoard event files into the run directory")
      ->group("Saving");
  train->add_option("--format", flags->format, "Summary as table or json")
      ->check(CLI::IsMember({"table", "json"}))
      ->capture_default_str();
  train
      ->add_option("--compare", flags->compare,
                   "Show two runs' summary.json as BEFORE and AFTER; trains "
                   "nothing")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->expected(2);
  train->footer(
      "An interrupt (SIGINT, SIGTERM) finishes the micro-batch, saves and says "
      "how to\ngo on. Exit status: 0 done or stopped, 1 failed, 2 wrong "
      "usage.");
  train->callback([flags, train, &action] {
    action = [flags, train] { return train_with(*flags, *train); };
  });
}

}  // namespace reprise::command
