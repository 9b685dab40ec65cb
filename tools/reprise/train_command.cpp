#include "base/file.h"
#include "checks.h"
#include "commands.h"
#include "config_options.h"
#include "errors.h"
#include "progress.h"
#include "signals.h"
#include "train_flags.h"

#include <reprise/base/bytes.h>
#include <reprise/base/error.h>
#include <reprise/distributed/group.h>
#include <reprise/distributed/rank_info.h>
#include <reprise/memory/out_of_memory.h>
#include <reprise/observe/observer.h>
#include <reprise/train/trainer.h>
#include <reprise/version.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <torch/cuda.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>

namespace reprise::command {
namespace {

/// Shows progress, and activates `observer` during steady training.
class ObservedProgress final : public Progress {
 public:
  ObservedProgress(Observer* observer, std::FILE* out)
      : Progress(out), observer_(observer) {}

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

/// Sets `config` to the saved configuration of a run, overridden by flags that
/// were given. Throws if these would change the training.
void continue_from(const TrainConfig& saved, CLI::App& app,
                   TrainConfig& config) {
  config = saved;
  for (CLI::Option* option : app.get_options()) {
    // Stores the value of the flag again.
    if (option->count() > 0) option->run_callback();
  }
  // A run without a budget had no plan; plan it if a budget is given now.
  const bool new_budget = saved.memory_limit == 0 && config.memory_limit > 0;
  if (new_budget && app.count("--recompute") == 0) config.recompute.clear();
  if (app.count("--steps") > app.count("--epochs")) config.epochs = 0;
  if (app.count("--epochs") > app.count("--steps")) config.steps = 0;
  const std::string what = conflict(saved, config);
  TORCH_CHECK(what.empty(), "[--resume] that would be another training: ", what,
              "; start a new one with --out");
}

/// Joins the group of ranks that a launcher has started; returns null for a
/// single process. On CUDA, each rank gets its own device if there are enough.
std::shared_ptr<RankGroup> join_ranks(const TrainFlags& flags,
                                      TrainConfig& config) {
  const auto place = rank_info_from_environment();
  if (!place) return nullptr;
  const torch::Device given(config.device);
  if (given.is_cuda() && !given.has_index()) {
    config.device = fmt::format(
        "cuda:{}",
        place->local_rank %
            std::max(1, static_cast<int>(torch::cuda::device_count())));
  }
  RankGroupOptions options;
  options.rank_info = *place;
  options.device = device_of(config.device);
  options.backend =
      flags.backend == Backend::kAuto ? "" : to_text(flags.backend);
  options.timeout_s = flags.rank_timeout_s;
  options.must_match = {{"reprise", version()},
                        {"LibTorch", libtorch_version()}};
  return RankGroup::join(options);
}

struct CloseFile {
  void operator()(std::FILE* file) const {
    if (file != stderr) std::fclose(file);
  }
};
using Log = std::unique_ptr<std::FILE, CloseFile>;

/// Opens the log of this rank: standard error for rank 0, a file in the run
/// directory for others.
Log open_log(const RankGroup* group, const std::string& directory) {
  if (group == nullptr || group->rank() == 0) return Log(stderr);
  const std::string path =
      directory.empty()
          ? "/dev/null"
          : fmt::format("{}/rank-{}.log", directory, group->rank());
  std::FILE* file = std::fopen(path.c_str(), "a");
  // Discard the log if this machine cannot access the directory.
  return Log(file != nullptr ? file : std::fopen("/dev/null", "a"));
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

/// Returns the directory that the run will be saved in; empty if it is not
/// saved. Throws CLI::ValidationError if it is not writable, before any work is
/// done.
std::string output_directory(const TrainFlags& flags) {
  if (flags.saves_nothing() || !flags.resume.empty()) return "";
  const std::string path =
      flags.out.empty() ? default_directory(flags.config) : flags.out;
  std::error_code none;
  if (std::filesystem::exists(path + "/config.json", none)) {
    throw CLI::ValidationError(
        "--out", fmt::format("{} holds a run already; continue it with "
                             "--resume {}, or name another directory",
                             path, path));
  }
  const std::string error = writable_directory()(path);
  if (!error.empty()) throw CLI::ValidationError("--out", error);
  return path;
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

int train_with(TrainFlags& flags, CLI::App& app,
               const std::shared_ptr<RankGroup>& ranks) {
  TrainConfig& config = flags.config;
  const std::string device = config.device;  // device of this rank
  const bool first = !ranks || ranks->rank() == 0;
  config.ranks = ranks ? ranks->size() : 1;
  std::optional<RunDirectory> directory;
  const std::string new_path = first ? output_directory(flags) : "";
  if (!flags.resume.empty()) {
    if (first) directory.emplace(RunDirectory::open(flags.resume));
    std::string text = first ? to_json(directory->config()) : "";
    if (ranks) text = ranks->broadcast_text(text);
    TrainConfig saved = config_from_json(text);
    saved.share_among(ranks ? ranks->size() : 1);
    continue_from(saved, app, config);
    if (ranks) {
      TORCH_CHECK(config.device.substr(0, 4) == device.substr(0, 4),
                  "[--resume] the run was on ", config.device,
                  ", the ranks are on ", device,
                  "; name the device again with --device");
      config.device = device;
    }
  }
  finish_train_flags(flags);
  if (ranks) ranks->require_same(config_fields().rank_values(config));
  PlanningOptions planning;
  planning.progress = [first](const std::string& text) {
    if (first) fmt::print(stderr, "{}\n", text);
  };
  // Start before the model is built, so that the baseline does not include it.
  std::optional<Observer> observer;
  if (flags.observe_ms > 0 && first) {
    observer.emplace(config.device, ObserverOptions{flags.observe_ms});
  }
  // Create the trainer first, so that errors occur before a file is written.
  Trainer trainer(make_inputs(config), config,
                  {.planning = planning, .ranks = ranks});
  if (!first) {
  } else if (!flags.resume.empty()) {
    directory->set_config(config);
  } else if (!new_path.empty()) {
    directory.emplace(RunDirectory::create(new_path, config));
  }

  std::string path = directory ? directory->path() : "";
  if (ranks) path = ranks->broadcast_text(path);
  const Log log = open_log(ranks.get(), path);
  const auto stop = stop_on_signals();
  TrainResult result;
  std::optional<Observation> seen;
  {
    ObservedProgress progress(observer ? &*observer : nullptr, log.get());
    TrainRun run;
    run.directory = directory ? &*directory : nullptr;
    run.resume = !flags.resume.empty();
    run.listener = &progress;
    run.stop = stop;
    run.export_path = flags.export_path;
    if (config.tensorboard && first) {
      run.tensorboard =
          (directory ? directory->path() + "/" : "") + "tensorboard";
    }
    result = trainer.run(run);
    if (progress.begun()) seen = observer->end();
  }
  if (directory) {
    AtomicFile file(directory->path() + "/summary.json");
    file.write(to_json(result.summary) + "\n");
    file.commit();
  }
  if (ranks) ranks->leave();
  if (!first) return result.stopped ? stopped_status() : kDone;
  return report(flags, result, seen, path);
}

/// Trains as one of the ranks. Reports an error to the other ranks.
int train_as_rank(TrainFlags& flags, CLI::App& app) {
  check_train_flags(flags, app);
  if (!flags.compare.empty()) return compare_runs(flags.compare);
  const auto ranks = join_ranks(flags, flags.config);
  if (!ranks) return train_with(flags, app, nullptr);
  const auto fail = [&](const std::string& what) {
    ranks->fail(fmt::format("rank {} failed: {}", ranks->rank(), what));
  };
  try {
    return train_with(flags, app, ranks);
  } catch (const std::exception& error) {
    fail(user_message(error));
    throw;
  }
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

int train_with_json_errors(TrainFlags& flags, CLI::App& app) {
  if (flags.format != OutputFormat::kJson) return train_as_rank(flags, app);
  try {
    return train_as_rank(flags, app);
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
      "An interrupt (SIGINT, SIGTERM) finishes the micro-batch, saves and says "
      "how to\ngo on. With --format json a failure is an object with error and "
      "out_of_memory.\nExit status: 0 done, 1 failed, 2 wrong usage, 130 "
      "interrupted (143 by SIGTERM).");
  train->callback([flags, train, &action] {
    action = [flags, train] { return train_with_json_errors(*flags, *train); };
  });
}

}  // namespace reprise::command
