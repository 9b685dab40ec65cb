#include "base/file.h"
#include "base/text_check.h"
#include "train/config/check_device.h"
#include "train/store/last_metrics.h"

#include <reprise/distributed/launch.h>
#include <reprise/train/fields.h>
#include <reprise/train/run.h>
#include <reprise/version.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/cuda.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <utility>

namespace reprise {
namespace {

/// Joins the ranks that a launcher has started; returns null for a single process.
std::shared_ptr<RankGroup> join_ranks(const RunOptions& options,
                                      TrainOptions& config) {
  const auto place = rank_info_from_environment();
  if (!place) return nullptr;
  const torch::Device given(config.device);
  if (given.is_cuda() && !given.has_index()) {
    const int devices =
        std::max(1, static_cast<int>(torch::cuda::device_count()));
    config.device = fmt::format("cuda:{}", place->local_rank % devices);
  }
  RankGroupOptions group;
  group.rank_info = *place;
  group.device = detail::check_device(config);
  group.backend = options.backend;
  group.timeout_s = options.rank_timeout_s;
  group.must_match = {{"reprise", version()}, {"LibTorch", libtorch_version()}};
  return RankGroup::join(group);
}

/// Checks before any work is done that a run can be saved in `path`.
void check_new_directory(const std::string& path) {
  std::error_code none;
  TORCH_CHECK(!std::filesystem::exists(path + "/config.json", none), "[--out] ",
              path, " holds a run already; continue it with --resume ", path,
              ", or name another directory");
  const std::string error = why_directory_unwritable(path);
  TORCH_CHECK(error.empty(), "[--out] ", error);
}

struct CloseFile {
  void operator()(std::FILE* file) const {
    if (file != stderr) std::fclose(file);
  }
};
using Log = std::unique_ptr<std::FILE, CloseFile>;

const FieldTable<TrainOptions>& fields_of(const TrainOptions&) {
  return option_fields();
}
const FieldTable<TrainConfig>& fields_of(const TrainConfig&) {
  return config_fields();
}

/// A run as one of its ranks, or as the only process. `Config` is TrainOptions or
/// TrainConfig.
template <class Config>
class Run {
 public:
  using MakeInputs = std::function<TrainInputs(const Config&)>;

  Run(Config config, const MakeInputs& inputs, const RunOptions& options,
      std::shared_ptr<RankGroup> ranks)
      : config_(std::move(config)),
        inputs_(inputs),
        options_(options),
        ranks_(std::move(ranks)),
        first_(!ranks_ || ranks_->rank() == 0) {}

  RunResult train() {
    configure();
    PlanningOptions planning = options_.planning;
    if (!first_) planning.progress = nullptr;
    // Create the trainer first, so that errors occur before a file is written.
    Trainer trainer(inputs_(config_), config_,
                    {.planning = std::move(planning), .ranks = ranks_});
    open_directory();
    RunResult result;
    result.rank = ranks_ ? ranks_->rank() : 0;
    result.directory = directory_ ? directory_->path() : "";
    if (ranks_) result.directory = ranks_->broadcast_text(result.directory);
    result.training = run(trainer, result.directory);
    if (directory_) keep_summary(result.training);
    if (ranks_) ranks_->leave();
    return result;
  }

 private:
  bool resumes() const { return !options_.resume.empty(); }
  const FieldTable<Config>& fields() const { return fields_of(config_); }

  /// Completes the configuration, with that of the run to continue.
  void configure() {
    const int ranks = ranks_ ? ranks_->size() : 1;
    config_.ranks = ranks;
    if (resumes()) {
      continue_saved(ranks);
    } else if (first_ && !options_.out.empty()) {
      check_new_directory(options_.out);
    }
    config_.resolve();
    if (ranks_) ranks_->require_same(fields().rank_values(config_));
    if (first_ && options_.configured) options_.configured(config_);
  }

  /// Calls `read`; its errors name the file of the configuration.
  template <class Read>
  auto of_saved(Read read) const {
    try {
      return read();
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, "[--resume] ", options_.resume, "/config.json: ",
                  without_origin(error.what_without_backtrace()));
    }
  }

  void continue_saved(int ranks) {
    if (first_) directory_.emplace(RunDirectory::open(options_.resume));
    std::string text = first_ ? directory_->config() : "";
    if (ranks_) text = ranks_->broadcast_text(text);
    Config saved = of_saved([&] { return fields().from_json(text); });
    saved.share_among(ranks);
    // Groups of parameters are functions, which no file has.
    saved.optimizer.groups = config_.optimizer.groups;
    const std::string own_device = std::exchange(config_, saved).device;
    apply_changes(saved);
    of_saved([&] { fields().check(config_); });
    const std::string what = fields().conflict(saved, config_);
    TORCH_CHECK(what.empty(),
                "[--resume] that would be another training: ", what,
                "; start a new one with --out");
    if (!ranks_) return;
    TORCH_CHECK(torch::Device(config_.device).type() ==
                    torch::Device(own_device).type(),
                "[--resume] the run was on ", config_.device,
                ", the ranks are on ", own_device,
                "; name the device again with --device");
    config_.device = own_device;
  }

  void apply_changes(const Config& saved) {
    const auto& changes = options_.changes;
    for (const auto& [name, text] : changes) {
      const Field<Config>* field = fields().find(name);
      TORCH_CHECK(field != nullptr,
                  "[run_training] expected a field to change, got '", name,
                  "'");
      field->set(config_, text);
    }
    // A run without a budget had no plan; plan it if it has one now.
    const bool new_budget = saved.memory_limit == 0 && config_.memory_limit > 0;
    if (new_budget && !changes.contains("recompute")) config_.recompute.clear();
    const bool steps = changes.contains("steps");
    const bool epochs = changes.contains("epochs");
    if (steps && !epochs) config_.epochs = 0;
    if (epochs && !steps) config_.steps = 0;
  }

  void open_directory() {
    if (!first_) return;
    if (directory_) {
      directory_->set_config(to_json(config_));
    } else if (!options_.out.empty()) {
      directory_.emplace(RunDirectory::create(options_.out, to_json(config_)));
    }
  }

  TrainResult run(Trainer& trainer, const std::string& path) {
    const Log log = open_log(path);
    const auto listener =
        options_.listener ? options_.listener(log.get()) : nullptr;
    TrainRun run;
    run.directory = directory_ ? &*directory_ : nullptr;
    run.resume = resumes();
    run.listener = listener.get();
    run.stop = options_.stop;
    run.export_path = options_.export_path;
    if (config_.tensorboard && first_) {
      run.tensorboard = (path.empty() ? "" : path + "/") + "tensorboard";
    }
    return trainer.run(run);
  }

  Log open_log(const std::string& path) const {
    if (first_) return Log(stderr);
    const std::string name =
        path.empty() ? "/dev/null"
                     : fmt::format("{}/rank-{}.log", path, ranks_->rank());
    std::FILE* file = std::fopen(name.c_str(), "a");
    // Discard the log if this machine cannot access the directory.
    return Log(file != nullptr ? file : std::fopen("/dev/null", "a"));
  }

  /// Writes the summary. If the run had ended before, returns that of its training.
  void keep_summary(TrainResult& training) const {
    const std::string path = directory_->path() + "/summary.json";
    std::error_code none;
    if (training.unchanged && std::filesystem::exists(path, none)) {
      try {
        training.summary = summary_from_json(read_text(path));
        return;
      } catch (const std::exception&) {
        // Not readable; write it again.
      }
    }
    if (resumes()) {
      detail::add_last_metrics(training.summary, directory_->metrics_path());
    }
    AtomicFile file(path);
    file.write(to_json(training.summary) + "\n");
    file.commit();
  }

  Config config_;
  const MakeInputs& inputs_;
  const RunOptions& options_;
  std::shared_ptr<RankGroup> ranks_;
  bool first_;
  std::optional<RunDirectory> directory_;
};

template <class Config>
RunResult run_as_rank(Config config,
                      const std::function<TrainInputs(const Config&)>& inputs,
                      const RunOptions& options) {
  TORCH_CHECK(options.out.empty() || options.resume.empty(),
              "[--resume] continues in its own directory; --out is for new "
              "runs");
  const auto ranks = join_ranks(options, config);
  const auto fail = [&ranks](const std::string& what) {
    if (!ranks) return;
    ranks->fail(fmt::format("rank {} failed: {}", ranks->rank(), what));
  };
  try {
    return Run<Config>(std::move(config), inputs, options, ranks).train();
  } catch (const c10::Error& error) {
    fail(error.what_without_backtrace());
    throw;
  } catch (const std::exception& error) {
    fail(error.what());
    throw;
  }
}

}  // namespace

RunResult run_training(
    const TrainOptions& training,
    const std::function<TrainInputs(const TrainOptions&)>& inputs,
    const RunOptions& run) {
  return run_as_rank<TrainOptions>(training, inputs, run);
}

RunResult run_training(const TrainConfig& config, const RunOptions& run) {
  return run_as_rank<TrainConfig>(config, make_inputs, run);
}

}  // namespace reprise
