// Accuracy of plans. Compares predicted and measured peak and time for each model, at
// budgets between the smallest feasible one and the peak of the whole global batch
// without recomputation. With --sweep, compares the plan with the best of all
// combinations of micro-batch and strategy that fit. Exit status: 1 if a peak exceeds
// its budget or a prediction is too inaccurate.
#include "options.h"

#include <reprise/base/bytes.h>
#include <reprise/recompute/strategy.h>
#include <reprise/train/planning.h>
#include <reprise/version.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <optional>
#include <utility>

namespace {

using nlohmann::json;
using reprise::format_bytes;
using reprise::Plan;
using reprise::PlanMeasurement;
using reprise::PlanRequest;
using reprise::PlanResult;
using reprise::Precision;
using reprise::StrategyKind;
using reprise::TrainConfig;

constexpr double kPeakTolerance = 0.03;
constexpr double kTimeTolerance = 0.10;   // on CUDA
constexpr double kSweepTolerance = 0.05;  // relative to the best combination
constexpr double kNoise = 0.10;           // of measured times

struct Case {
  std::string model;
  int64_t global_batch;
  Precision precision = Precision::kFp32;
  reprise::ModelOptions options{};
};

std::vector<Case> cases_for(bool cuda) {
  if (cuda) {
    return {{"cnn-basic", 16, Precision::kFp32, {.image_size = 1792}},
            {"cnn-profile", 32, Precision::kFp32, {}},
            {"vgg16", 64, Precision::kFp32, {}},
            {"resnet50", 64, Precision::kFp32, {}},
            {"unet", 32, Precision::kFp32, {}},
            {"bert-base", 32, Precision::kBf16, {.seq = 512}},
            {"gpt2", 16, Precision::kBf16, {}},
            {"vit-b-16", 64, Precision::kBf16, {}}};
  }
  return {{"cnn-basic", 16, Precision::kFp32, {.image_size = 56}},
          {"cnn-profile", 4, Precision::kFp32, {.image_size = 64}},
          {"vgg16", 8, Precision::kFp32, {.width = 16, .image_size = 32}},
          {"resnet50", 8, Precision::kFp32, {.width = 16, .image_size = 64}},
          {"unet", 4, Precision::kFp32, {.width = 8, .image_size = 64}},
          {"bert-base",
           8,
           Precision::kFp32,
           {.depth = 4, .width = 128, .vocab = 512, .seq = 64}},
          {"gpt2",
           8,
           Precision::kFp32,
           {.depth = 4, .width = 128, .vocab = 512, .seq = 64}},
          {"vit-b-16",
           8,
           Precision::kFp32,
           {.depth = 4, .width = 128, .image_size = 64}}};
}

struct Settings {
  std::string device = "cpu";
  std::vector<std::string> models;
  int budgets = 5;
  int windows = 4;
  int threads = 0;
  bool sweep = false;
  bool fresh = false;
};

TrainConfig config_of(const Case& one, const Settings& settings) {
  TrainConfig config;
  config.model = one.model;
  config.model_options = one.options;
  config.precision = one.precision;
  config.global_batch = one.global_batch;
  config.optimizer.name = "adamw";
  config.device = settings.device;
  config.threads = settings.threads;
  config.steps = 1;
  config.random_samples = 1024;
  config.resolve();
  return config;
}

PlanRequest request_of(const Case& one) {
  PlanRequest request;
  request.global_batch = one.global_batch;
  request.precisions = {one.precision};
  return request;
}

double off_by(double predicted, double measured) {
  return predicted / measured - 1;
}

class Report {
 public:
  explicit Report(bool cuda) : cuda_(cuda) {}

  void head() const {
    fmt::print(
        "{:<12} {:>10} {:>9} {:>6} {:>10} {:>10} {:>7} {:>9} {:>9} {:>7}\n",
        "model", "budget", "micro×acc", "rerun", "predicted", "measured", "off",
        "predicted", "measured", "off");
  }

  void row(const std::string& model, int64_t budget, const Plan& plan,
           const PlanMeasurement& measured) {
    const double peak_off = off_by(static_cast<double>(plan.peak_bytes),
                                   static_cast<double>(measured.peak_bytes));
    const double time_off = off_by(plan.step_ms, measured.step_ms);
    std::string wrong;
    if (measured.peak_bytes > budget) wrong += " over budget";
    if (std::abs(peak_off) > kPeakTolerance) wrong += " peak";
    if (cuda_ && std::abs(time_off) > kTimeTolerance) wrong += " time";
    if (last_ms_ > 0 && measured.step_ms > last_ms_ * (1 + kNoise)) {
      wrong += " slower than with a smaller budget";
    }
    last_ms_ = measured.step_ms;
    fmt::print(
        "{:<12} {:>10} {:>9} {:>6} {:>10} {:>10} {:>6.1f}% {:>6.1f} ms "
        "{:>6.1f} "
        "ms {:>6.1f}%{}\n",
        model, format_bytes(budget),
        fmt::format("{}×{}", plan.micro_batch, plan.accumulate),
        plan.schedule.total_runs() - plan.schedule.stages(),
        format_bytes(plan.peak_bytes), format_bytes(measured.peak_bytes),
        100 * peak_off, plan.step_ms, measured.step_ms, 100 * time_off, wrong);
    std::fflush(stdout);
    failures_ += wrong.empty() ? 0 : 1;
    rows_.push_back({{"model", model},
                     {"budget", budget},
                     {"micro_batch", plan.micro_batch},
                     {"accumulate", plan.accumulate},
                     {"schedule", plan.schedule.to_text()},
                     {"predicted_bytes", plan.peak_bytes},
                     {"measured_bytes", measured.peak_bytes},
                     {"predicted_ms", plan.step_ms},
                     {"measured_ms", measured.step_ms},
                     {"spread_ms", measured.step_ms_spread},
                     {"wrong", wrong}});
  }

  void next_model() { last_ms_ = 0; }
  void fail() { ++failures_; }
  int failures() const { return failures_; }
  const json& rows() const { return rows_; }

 private:
  bool cuda_;
  double last_ms_ = 0;
  int failures_ = 0;
  json rows_ = json::array();
};

/// Peak bytes of the whole global batch without recomputation.
int64_t plain_peak(const PlanResult& result) {
  int64_t most = 0;
  for (const auto& point : result.references) {
    if (point.strategy == StrategyKind::kNone) {
      most = std::max(most, point.peak_bytes);
    }
  }
  return most;
}

std::vector<int64_t> budgets_between(int64_t low, int64_t high, int count) {
  std::vector<int64_t> budgets;
  for (int i = 0; i < count; ++i) {
    budgets.push_back(low + (high - low) * i / std::max(1, count - 1));
  }
  return budgets;
}

void table(const Case& one, const Settings& settings, Report& report) {
  const TrainConfig config = config_of(one, settings);
  reprise::PlanningOptions options;
  options.fresh = settings.fresh;
  std::optional<reprise::TrainingPlanner> planner(std::in_place, config,
                                                  options);
  PlanRequest request = request_of(one);
  request.memory = 1;  // infeasible, to get the smallest budget
  const PlanResult least = planner->plan(request);
  const int64_t high = std::max(least.smallest_bytes,
                                plain_peak(least) + plain_peak(least) / 40);
  std::vector<std::pair<int64_t, PlanResult>> plans;
  for (const int64_t budget :
       budgets_between(least.smallest_bytes, high, settings.budgets)) {
    request.memory = budget;
    plans.emplace_back(budget, planner->plan(request));
  }
  planner.reset();  // frees the memory of the model
  report.next_model();
  std::string last;
  PlanMeasurement measured;
  for (const auto& [budget, result] : plans) {
    if (!result.feasible) {
      fmt::print("{:<12} {:>10} infeasible\n", one.model, format_bytes(budget));
      report.fail();
      continue;
    }
    // The same plan is measured only once.
    const std::string plan = fmt::format("{} {}", result.plan.micro_batch,
                                         result.plan.schedule.to_text());
    if (plan != last) {
      measured = measure_plan(config, result.plan, budget, settings.windows);
    }
    last = plan;
    report.row(one.model, budget, result.plan, measured);
  }
}

struct Hand {
  int64_t micro_batch;
  std::string strategy;
  Plan plan;
};

/// Manual choices: powers of two and the usual strategies. Choices whose predicted peak
/// is far above the budget are left out.
std::vector<Hand> by_hand(const Case& one, reprise::TrainingPlanner& planner,
                          PlanRequest request, int stages) {
  std::vector<Hand> list;
  for (int64_t micro = one.global_batch; micro >= 1; micro /= 2) {
    for (const std::string strategy :
         {"none", "all", "sqrt", "every:2", "every:3", "every:4"}) {
      if (strategy.size() > 6 && strategy[6] - '0' > stages) continue;
      request.micro_batch = micro;
      request.strategy = strategy;
      try {
        const PlanResult result = planner.plan(request);
        if (result.plan.peak_bytes > request.memory + request.memory / 20) {
          continue;
        }
        list.push_back({micro, strategy, result.plan});
      } catch (const c10::Error&) {
        // The model does not support this size.
      }
    }
  }
  return list;
}

void sweep(const Case& one, const Settings& settings, Report& report) {
  const TrainConfig config = config_of(one, settings);
  std::optional<reprise::TrainingPlanner> planner(std::in_place, config);
  PlanRequest request = request_of(one);
  request.memory = 1;
  const PlanResult least = planner->plan(request);
  // A budget at which some choices fit and some do not.
  request.memory =
      least.smallest_bytes + (plain_peak(least) - least.smallest_bytes) / 3;
  const PlanResult result = planner->plan(request);
  auto hands =
      by_hand(one, *planner, request, static_cast<int>(result.stages.size()));
  planner.reset();
  // The slowest choices are not measured.
  std::sort(hands.begin(), hands.end(), [](const Hand& a, const Hand& b) {
    return a.plan.step_ms < b.plan.step_ms;
  });
  std::erase_if(hands, [&](const Hand& hand) {
    return hand.plan.step_ms > 2 * hands.front().plan.step_ms;
  });
  const PlanMeasurement ours =
      measure_plan(config, result.plan, request.memory, settings.windows);
  fmt::print("{}: budget {}, plan {}×{}, {} rerun: {:.1f} ms, {}\n", one.model,
             format_bytes(request.memory), result.plan.micro_batch,
             result.plan.accumulate,
             result.plan.schedule.total_runs() - result.plan.schedule.stages(),
             ours.step_ms, format_bytes(ours.peak_bytes));
  double best_ms = 0;
  std::string best;
  for (const Hand& hand : hands) {
    const PlanMeasurement measured =
        measure_plan(config, hand.plan, request.memory, settings.windows);
    const bool fits = measured.peak_bytes <= request.memory;
    fmt::print("  {:>4} × {:<8} {:>10} {:>9.1f} ms{}\n", hand.micro_batch,
               hand.strategy, format_bytes(measured.peak_bytes),
               measured.step_ms, fits ? "" : "  over budget");
    std::fflush(stdout);
    if (fits && (best_ms == 0 || measured.step_ms < best_ms)) {
      best_ms = measured.step_ms;
      best = fmt::format("{} × {}", hand.micro_batch, hand.strategy);
    }
  }
  const bool good =
      best_ms == 0 || ours.step_ms <= best_ms * (1 + kSweepTolerance);
  fmt::print(
      "  best manual choice: {}, {:.1f} ms; ratio of the plan: {:.3f}{}\n",
      best, best_ms, best_ms > 0 ? ours.step_ms / best_ms : 0,
      good ? "" : ": TOO SLOW");
  if (!good) report.fail();
}

/// The cases of the named models; all cases if no model is named.
std::vector<Case> chosen(const std::vector<Case>& cases,
                         const std::vector<std::string>& models) {
  if (models.empty()) return cases;
  std::vector<Case> found;
  for (const std::string& model : models) {
    const auto one =
        std::find_if(cases.begin(), cases.end(),
                     [&](const Case& c) { return c.model == model; });
    std::string names;
    for (const Case& c : cases) names += " " + c.model;
    TORCH_CHECK(one != cases.end(), "--models: expected any of", names,
                ", got ", model);
    found.push_back(*one);
  }
  return found;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  std::string json_path;
  reprise::bench::Options("Compare predicted and measured plans")
      .add_device(&settings.device)
      .add("--models", &settings.models, "Names of the models; default: all")
      .add_positive("--budgets", &settings.budgets,
                    "Number of budgets per model")
      .add_positive("--windows", &settings.windows,
                    "Number of measured windows")
      .add("--threads", &settings.threads, "Number of CPU threads")
      .add_flag("--sweep", &settings.sweep,
                "Compare with all micro-batches and strategies")
      .add_flag("--fresh", &settings.fresh, "Ignore cached costs")
      .add("--json", &json_path, "File for the results as JSON")
      .parse(argc, argv);

  const bool cuda = settings.device.rfind("cuda", 0) == 0;
  fmt::print("LibTorch {}, {}\n\n", reprise::libtorch_version(),
             settings.device);
  Report report(cuda);
  if (!settings.sweep) report.head();
  for (const Case& one : chosen(cases_for(cuda), settings.models)) {
    if (settings.sweep) {
      sweep(one, settings, report);
    } else {
      table(one, settings, report);
    }
  }
  if (!json_path.empty()) {
    FILE* file = std::fopen(json_path.c_str(), "w");
    if (file != nullptr) {
      fmt::print(file, "{}\n", report.rows().dump(1));
      std::fclose(file);
    }
  }
  fmt::print("\n{}\n", report.failures() == 0
                           ? "all budgets and predictions within tolerance"
                           : fmt::format("{} outside of the tolerance",
                                         report.failures()));
  return report.failures() == 0 ? 0 : 1;
}
