#include "commands.h"
#include "config_options.h"
#include "progress.h"
#include "signals.h"
#include "train_flags.h"

#include <reprise/data/file.h>
#include <reprise/memory/bytes.h>
#include <reprise/observe/observer.h>
#include <reprise/torch/out_of_memory.h>
#include <reprise/train/trainer.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <ctime>
#include <iostream>
#include <memory>
#include <optional>

namespace reprise::command {
namespace {

/// Progress, and a look at the device while it trains.
class Watched final : public Progress {
 public:
  explicit Watched(Observer* observer) : observer_(observer) {}

  bool begun() const { return begun_; }

  void training(bool active) override {
    if (observer_ == nullptr) return;
    if (!active) {
      observer_->pause();
    } else if (!begun_) {
      observer_->begin();
      begun_ = true;
    } else {
      observer_->resume();
    }
  }

 private:
  Observer* observer_;  // not owned; null: none
  bool begun_ = false;
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

int report(const TrainFlags& flags, const TrainResult& result,
           const std::optional<Observation>& seen,
           const std::string& directory) {
  if (flags.format == "json") {
    auto object = nlohmann::ordered_json::parse(to_json(result.summary));
    if (seen) object.update(nlohmann::ordered_json::parse(to_json(*seen)));
    std::cout << object.dump(2) << std::endl;
  } else {
    std::cout << to_table(result.summary) << std::flush;
    if (seen) std::cout << to_table(*seen) << std::flush;
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

int train_with(TrainFlags& flags, CLI::App& app) {
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
  finish_train_flags(flags, app);
  PlanningOptions planning;
  planning.progress = [](const std::string& text) {
    fmt::print(stderr, "{}\n", text);
  };
  // Before the model is there, so that it is none of the baseline.
  std::optional<Observer> observer;
  if (flags.observe_ms > 0) {
    observer.emplace(config.device, ObserverOptions{flags.observe_ms});
  }
  // Whatever is wrong shows before a file is touched.
  Training training(config, nullptr, planning);
  if (!flags.resume.empty()) {
    directory->set_config(config);
  } else if (flags.out != "none") {
    const std::string path =
        flags.out.empty() ? default_directory(config) : flags.out;
    directory.emplace(RunDirectory::create(path, config));
  }

  const auto stop = stop_on_signals();
  TrainResult result;
  std::optional<Observation> seen;
  {
    Watched progress(observer ? &*observer : nullptr);
    TrainRun run;
    run.directory = directory ? &*directory : nullptr;
    run.resume = !flags.resume.empty();
    run.listener = &progress;
    run.stop = stop;
    run.export_path = flags.export_path;
    if (config.tensorboard) {
      run.tensorboard =
          (directory ? directory->path() + "/" : "") + "tensorboard";
    }
    result = training.run(run);
    if (progress.begun()) seen = observer->end();
  }
  if (directory) {
    AtomicFile file(directory->path() + "/summary.json");
    file.write(to_json(result.summary) + "\n");
    file.commit();
  }
  return report(flags, result, seen, directory ? directory->path() : "");
}

/// Programs that read the figures read the failure too.
void print_failure(const std::string& what, bool out_of_memory) {
  std::cout << nlohmann::ordered_json{{"error", what},
                                      {"out_of_memory", out_of_memory}}
                   .dump(2)
            << std::endl;
}

int train_or_say_why(TrainFlags& flags, CLI::App& app) {
  if (flags.format != "json") return train_with(flags, app);
  try {
    return train_with(flags, app);
  } catch (const c10::Error& error) {
    print_failure(error.what_without_backtrace(),
                  compat::is_out_of_memory(error));
    throw;
  } catch (const std::bad_alloc& error) {
    print_failure(error.what(), true);
    throw;
  }
}

}  // namespace

void add_train(CLI::App& app, Action& action) {
  auto flags = std::make_shared<TrainFlags>();
  CLI::App* train = add_train_flags(app, *flags);
  train->footer(
      "An interrupt (SIGINT, SIGTERM) finishes the micro-batch, saves and says "
      "how to\ngo on. With --format json a failure is an object with error and "
      "out_of_memory.\nExit status: 0 done or stopped, 1 failed, 2 wrong "
      "usage.");
  train->callback([flags, train, &action] {
    action = [flags, train] { return train_or_say_why(*flags, *train); };
  });
}

}  // namespace reprise::command
