#include "base/file.h"
#include "checks.h"
#include "commands.h"
#include "config_options.h"
#include "errors.h"
#include "memory_limit.h"
#include "output.h"
#include "progress.h"
#include "signals.h"
#include "train_flags.h"

#include <reprise/base/bytes.h>
#include <reprise/base/error.h>
#include <reprise/distributed/launch.h>
#include <reprise/memory/meter.h>
#include <reprise/observe/observer.h>
#include <reprise/train/run.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cstdio>
#include <ctime>
#include <iostream>
#include <map>
#include <memory>
#include <optional>

namespace reprise::command {
namespace {

/// Shows progress, and activates `observer` during steady training. Sets `begun`
/// when that begins.
class ObservedProgress final : public Progress {
 public:
  ObservedProgress(Observer* observer, bool& begun, std::FILE* out)
      : Progress(out), observer_(observer), begun_(begun) {}

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
  bool& begun_;
};

std::string default_directory(const TrainConfig& config) {
  const std::time_t now = std::time(nullptr);
  char when[32];
  std::strftime(when, sizeof when, "%Y%m%d-%H%M%S", std::localtime(&now));
  return fmt::format("reprise-runs/{}-{}", config.model, when);
}

/// Returns the values of the flags that were given, by field.
std::map<std::string, std::string> given_fields(const CLI::App& app,
                                                const TrainConfig& config) {
  std::map<std::string, std::string> values;
  for (const auto& field : config_fields()) {
    const CLI::Option* option = app.get_option_no_throw("--" + field.name);
    if (option != nullptr && option->count() > 0) {
      values[field.name] = field.get(config);
    }
  }
  return values;
}

int compare_runs(const std::vector<std::string>& paths) {
  const auto read = [](const std::string& path) {
    try {
      return summary_from_json(read_text(path));
    } catch (const c10::Error& error) {
      throw CLI::ValidationError(
          fmt::format("{} ({})", user_message(error), path));
    } catch (const Error& error) {
      throw CLI::ValidationError(
          fmt::format("{} ({})", user_message(error), path));
    }
  };
  const TrainSummary before = read(paths.at(0));
  std::cout << compare(before, read(paths.at(1)));
  return kDone;
}

int report(const TrainFlags& flags, const TrainResult& result,
           const std::optional<Observation>& seen,
           const std::string& directory) {
  if (flags.format == OutputFormat::kJson) {
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
  if (result.save_failed) return kFailed;
  const TrainSummary& s = result.summary;
  if (s.limit_bytes > 0 && s.peak_bytes > s.limit_bytes) {
    std::cerr << fmt::format(
        "reprise: the peak was {} bytes, {} above --memory {}; give it at "
        "least "
        "the peak, or a smaller --batch\n",
        s.peak_bytes, format_bytes(s.peak_bytes - s.limit_bytes),
        s.limit_bytes);
    return kFailed;
  }
  return result.stopped ? stopped_status() : kDone;
}

int train(TrainFlags& flags, const CLI::App& app) {
  check_train_flags(flags, app);
  if (!flags.compare.empty()) return compare_runs(flags.compare);
  ignore_output_signals();
  RunOptions options;
  options.resume = flags.resume;
  if (!flags.saves_nothing() && flags.resume.empty()) {
    options.out =
        flags.out.empty() ? default_directory(flags.config) : flags.out;
  }
  options.changes = given_fields(app, flags.config);
  options.planning.progress = [](const std::string& text) {
    print_text(text + "\n");
  };
  options.export_path = flags.export_path;
  options.backend =
      flags.backend == Backend::kAuto ? "" : to_text(flags.backend);
  options.rank_timeout_s = flags.rank_timeout_s;
  std::optional<Observer> observer;
  bool observed = false;
  // Start before the model is built, so that the baseline does not include it.
  options.configured = [&](const TrainOptions& config) {
    if (flags.observe_ms <= 0) return;
    observer.emplace(config.device, ObserverOptions{flags.observe_ms});
  };
  // A signal before training begins ends the process at once.
  std::function<bool()> signalled;
  options.stop = [&] { return signalled && signalled(); };
  options.listener = [&](std::FILE* log) {
    signalled = stop_on_signals();
    return std::make_unique<ObservedProgress>(observer ? &*observer : nullptr,
                                              observed, log);
  };
  if (flags.resume.empty() && flags.config.data.empty()) {
    flags.config.data = default_data(flags.config);
  }
  const RunResult result = run_training(flags.config, options);
  std::optional<Observation> seen;
  if (observed) seen = observer->end();
  if (result.rank > 0) {
    return result.training.stopped ? stopped_status() : kDone;
  }
  return report(flags, result.training, seen, result.directory);
}

/// Prints the error as JSON, for programs that read the summary.
void print_failure(const std::string& what, bool out_of_memory) {
  try {
    // Only the first rank writes to standard output.
    const auto place = rank_info_from_environment();
    if (place && place->rank != 0) return;
  } catch (const c10::Error&) {
    // An invalid environment variable may be the error to report.
  }
  std::cout << nlohmann::ordered_json{{"error", what},
                                      {"out_of_memory", out_of_memory}}
                   .dump(2)
            << std::endl;
}

int train_with_json_errors(TrainFlags& flags, const CLI::App& app) {
  const auto limited = [&] {
    apply_memory_limit();
    return train(flags, app);
  };
  if (flags.format != OutputFormat::kJson) return limited();
  try {
    return limited();
  } catch (const CLI::Error& error) {
    print_failure(error.what(), false);
    throw;
  } catch (const c10::Error& error) {
    print_failure(user_message(error), is_out_of_memory(error));
    throw;
  } catch (const Error& error) {
    print_failure(user_message(error), false);
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
      "An interrupt (SIGINT, SIGTERM, or SIGHUP if the terminal is closed) "
      "finishes the\nmicro-batch, saves and says how to go on. Output that "
      "cannot be written is lost, the\ntraining continues. With --format json "
      "a failure is an object with error and\nout_of_memory.\nExit status: 0 "
      "done, 1 failed, 2 wrong usage, 130 interrupted (143 by SIGTERM, 129\nby "
      "SIGHUP).");
  train->callback([flags, train, &action] {
    action = [flags, train] { return train_with_json_errors(*flags, *train); };
  });
}

}  // namespace reprise::command
