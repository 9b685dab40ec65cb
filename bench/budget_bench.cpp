// Checks that trainings stay within their memory budget. Draws random small trainings
// (models of the zoo, their options, optimizer, precision and sizes), plans the
// smallest feasible budget of each, trains within that budget and larger ones, and
// compares the measured peak with the budget. A failing case prints the command that
// repeats it. Exit status: 1 if a peak exceeded its budget or the smallest budget was
// rejected.
#include "options.h"

#include <reprise/base/bytes.h>
#include <reprise/train/fields.h>
#include <reprise/train/optimizer.h>
#include <reprise/train/planning.h>
#include <reprise/train/trainer.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <optional>
#include <random>
#include <unistd.h>
#include <utility>

namespace {

using reprise::ImageLayout;
using reprise::ModelOptions;
using reprise::PlanningOptions;
using reprise::PlanRequest;
using reprise::PlanResult;
using reprise::Precision;
using reprise::TrainConfig;
using reprise::TrainResult;
using reprise::WeightCopiesMode;

/// A temporary cache for the cost profiles of this process.
class OwnCache {
 public:
  OwnCache()
      : folder_(std::filesystem::temp_directory_path() /
                fmt::format("reprise-budget-{}", ::getpid())) {
    ::setenv("XDG_CACHE_HOME", folder_.c_str(), 1);
  }
  ~OwnCache() {
    // Without remove_all: PyTorch's LibTorch exports symbols of another libstdc++.
    std::error_code none;
    const auto profiles = folder_ / "reprise" / "profiles";
    std::vector<std::filesystem::path> files;
    for (const auto& file :
         std::filesystem::directory_iterator(profiles, none)) {
      files.push_back(file.path());
    }
    for (const auto& file : files) std::filesystem::remove(file, none);
    for (auto path = profiles; path != folder_.parent_path();
         path = path.parent_path()) {
      std::filesystem::remove(path, none);
    }
  }
  OwnCache(const OwnCache&) = delete;
  OwnCache& operator=(const OwnCache&) = delete;

 private:
  std::filesystem::path folder_;
};

/// Draws random trainings, reproducibly for a given seed.
class Draw {
 public:
  Draw(uint64_t seed, std::string device)
      : generator_(seed), device_(std::move(device)) {}

  TrainConfig training() {
    TrainConfig config;
    config.device = device_;
    draw_model(config);
    config.optimizer.name = any(reprise::optimizer_names());
    if (config.optimizer.name == "sgd" && coin()) {
      config.optimizer.momentum = 0.9;
    }
    if (config.optimizer.name.ends_with("8bit")) {
      config.quantize_embeddings = coin();
    }
    config.precision =
        any<Precision>({Precision::kFp32, Precision::kFp32, Precision::kBf16});
    if (config.precision == Precision::kBf16) {
      config.weight_copies = reprise::from_text<WeightCopiesMode>(
          any(reprise::names_of<WeightCopiesMode>()));
    }
    if (number(0, 3) == 0) config.clip = 0.5;
    config.layout =
        number(0, 4) == 0 ? ImageLayout::kChannelsLast : ImageLayout::kPlanes;
    config.data = "random";
    config.random_samples = number(8, 64);
    config.workers = static_cast<int>(number(0, 2));
    config.global_batch = number(1, 24);
    if (number(0, 2) == 0) config.batch = number(1, config.global_batch);
    config.steps = number(1, 3);
    config.threads = 1;
    config.seed = static_cast<uint64_t>(number(1, 1000));
    // Random data has a test split only if evaluation is requested.
    config.evaluate = number(0, 3) == 0;
    if (config.evaluate) config.eval_every = 1;
    return config;
  }

  /// A random number in [0, 1).
  double share() { return std::uniform_real_distribution<>()(generator_); }

 private:
  int64_t number(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(generator_);
  }
  bool coin() { return number(0, 1) == 1; }
  template <class T>
  T any(const std::vector<T>& list) {
    return list[static_cast<size_t>(
        number(0, static_cast<int64_t>(list.size()) - 1))];
  }

  void draw_model(TrainConfig& config) {
    config.model = any<std::string>(
        {"mlp", "cnn-basic", "cnn-blocks", "cnn-profile", "vgg16", "resnet18",
         "resnet50", "unet", "bert-base", "gpt2", "vit-b-16"});
    ModelOptions& m = config.model_options;
    const auto transformer = [&] {
      m.depth = number(1, 6);
      m.heads = number(1, 3);
      m.width = m.heads * 8 * number(1, 3);
      if (coin()) m.dropout = any<double>({0.0, 0.1, 0.3});
    };
    if (config.model == "mlp") {
      m.depth = number(1, 16);
      m.width = number(4, 64);
      m.image_size = number(4, 16);
      if (coin()) m.dropout = 0.2;
    } else if (config.model == "cnn-basic") {
      m.image_size = 28;
      m.norm = any<std::string>({"batch", "group"});
    } else if (config.model == "cnn-blocks") {
      m.depth = number(1, 5);
      m.width = 2 * number(1, 6);
      m.image_size = number(8, 24);
    } else if (config.model == "cnn-profile") {
      m.image_size = 8;
    } else if (config.model == "vgg16") {
      m.width = number(1, 4);
      m.image_size = 32;
    } else if (config.model.starts_with("resnet")) {
      m.width = 4 * number(1, 2);
      m.image_size = 8 * number(4, 5);
    } else if (config.model == "unet") {
      m.depth = number(1, 3);
      m.width = 4 * number(1, 2);
      m.image_size = 16;
    } else if (config.model == "vit-b-16") {
      transformer();
      m.image_size = 16 * number(1, 3);
    } else {
      transformer();
      m.vocab = number(10, 500);
      m.seq = number(4, 64);
    }
  }

  std::mt19937_64 generator_;
  std::string device_;
};

/// The command that repeats a training.
std::string command_of(const TrainConfig& config) {
  const TrainConfig defaults;
  std::string text = "reprise train";
  for (const auto& field : reprise::config_fields()) {
    const std::string value = field.get(config);
    if (!field.on_command_line || value == field.get(defaults)) continue;
    text += fmt::format(" --{}={}", field.name, value);
  }
  return text + " --out none";
}

PlanRequest request_of(const TrainConfig& config, int64_t memory) {
  PlanRequest request;
  request.global_batch = config.global_batch;
  request.micro_batch = config.batch;
  request.memory = memory;
  request.precisions = {config.precision};
  request.explain = false;
  return request;
}

/// The smallest feasible budget, and the one above which the plan does not improve.
struct Range {
  int64_t smallest = 0;
  int64_t largest = 0;
};

/// Returns nullopt if the model cannot be trained with these options.
std::optional<Range> range_of(TrainConfig config,
                              const PlanningOptions& planning) {
  try {
    config.resolve();
    reprise::TrainingPlanner planner(config, planning);
    const PlanResult least = planner.plan(request_of(config, 1));
    const PlanResult most = planner.plan(request_of(config, 0));
    const auto with_margin =
        static_cast<int64_t>(1.05 * static_cast<double>(most.plan.peak_bytes));
    return Range{least.smallest_bytes,
                 std::max(least.smallest_bytes, with_margin)};
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

struct Totals {
  int trained = 0;
  int over = 0;  // the peak exceeded the budget
  int refused =
      0;  // the planner rejected a budget that it had reported as feasible
  int impossible =
      0;  // infeasible with any budget: BatchNorm with one value per channel
  int replanned = 0;    // within the budget only after planning again
  double highest = -1;  // relative error of the predicted peak
  double lowest = 1;
};

void train(TrainConfig config, const PlanningOptions& planning,
           Totals& totals) {
  const TrainConfig given = config;
  ++totals.trained;
  TrainResult result;
  try {
    config.resolve();
    result = reprise::Trainer(reprise::make_inputs(config), config,
                              {.planning = planning})
                 .run();
  } catch (const c10::Error& error) {
    if (std::string(error.msg()).find(" channel") != std::string::npos) {
      --totals.trained;
      ++totals.impossible;
      return;
    }
    ++totals.refused;
    fmt::print("REFUSED {}\n  {}\n", error.msg(), command_of(given));
    return;
  }
  const auto& s = result.summary;
  const double off = static_cast<double>(s.peak_bytes) /
                         static_cast<double>(s.predicted->peak_bytes) -
                     1;
  const bool over = s.peak_bytes > config.memory_limit;
  if (over || s.replans > 0) {
    fmt::print(
        "{} peak {}, budget {}, predicted {} ({:+.2f} %), {} × {}, {}\n"
        "  {}\n",
        over ? "OVER" : "replanned", s.peak_bytes, config.memory_limit,
        s.predicted->peak_bytes, 100 * off, s.micro_batch, s.accumulate,
        s.peak_phase + " " + s.peak_stage, command_of(given));
    std::fflush(stdout);
  }
  totals.over += over ? 1 : 0;
  totals.replanned += s.replans > 0 ? 1 : 0;
  // The prediction belongs to another plan; or no complete window ran after the first
  // update, which allocates the optimizer state.
  if (s.replans > 0 || config.random_samples < 2 * config.global_batch ||
      config.steps < 2) {
    return;
  }
  totals.highest = std::max(totals.highest, off);
  totals.lowest = std::min(totals.lowest, off);
  if (std::abs(off) > 0.02) {
    fmt::print("off by {:+.1f} %: {}\n", 100 * off, command_of(given));
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  int trainings = 1000;
  int budgets = 4;
  int64_t seed = 1;
  std::string device = "cpu";
  bool timed = false;
  bool verbose = false;
  reprise::bench::Options(
      "Check that random trainings stay within their memory budgets")
      .add_positive("--trainings", &trainings, "Number of trainings")
      .add_positive("--budgets", &budgets,
                    "Budgets per training, starting at the smallest")
      .add("--seed", &seed, "Seed of the random trainings")
      .add("--device", &device, "cpu or cuda")
      .add_flag("--timed", &timed,
                "Measure the time of plans, like the command; slower")
      .add_flag("--verbose", &verbose,
                "Print each training before it is planned")
      .parse(argc, argv);
  const OwnCache cache;
  PlanningOptions planning;
  planning.quick = !timed;
  Draw draw(static_cast<uint64_t>(seed), device);
  Totals totals;
  int impossible = 0;
  while (totals.trained < trainings) {
    TrainConfig config = draw.training();
    if (verbose) fmt::print(stderr, "{}\n", command_of(config));
    const auto range = range_of(config, planning);
    if (!range) {
      ++impossible;
      TORCH_CHECK(impossible < 100 + 10 * trainings,
                  "no model could be planned");
      continue;
    }
    for (int i = 0; i < budgets && totals.trained < trainings; ++i) {
      // The first budget is the smallest one; most others are only slightly larger.
      const double up = i == 0 ? 0 : std::pow(draw.share(), 2);
      config.memory_limit =
          range->smallest +
          static_cast<int64_t>(
              up * static_cast<double>(range->largest - range->smallest));
      train(config, planning, totals);
    }
    if (totals.trained % 100 < budgets) {
      fmt::print(stderr, "{} trained\n", totals.trained);
    }
  }
  fmt::print(
      "{} trainings: {} over budget, {} rejected, {} planned again ({} more "
      "are infeasible with any budget); error of the predicted peak from "
      "{:+.2f} % to {:+.2f} %\n",
      totals.trained, totals.over, totals.refused, totals.replanned,
      totals.impossible, 100 * totals.lowest, 100 * totals.highest);
  return totals.over + totals.refused == 0 ? 0 : 1;
}
