#include "base/file.h"
#include "base/text_check.h"
#include "checks.h"
#include "commands.h"
#include "config_options.h"
#include "errors.h"
#include "output.h"

#include <reprise/base/bytes.h>
#include <reprise/base/error.h>
#include <reprise/memory/meter.h>
#include <reprise/train/planning.h>

#include <fmt/format.h>

#include <cmath>
#include <iostream>
#include <memory>
#include <optional>

namespace reprise {
namespace command {

/// Values of --precision. kAuto selects the faster of fp32 and bf16.
enum class PlanPrecision { kAuto, kFp32, kBf16, kFp16 };

}  // namespace command

template <>
struct EnumText<command::PlanPrecision> {
  static constexpr std::array<std::string_view, 4> names{"auto", "fp32", "bf16",
                                                         "fp16"};
};

}  // namespace reprise

namespace reprise::command {
namespace {

struct PlanFlags {
  TrainConfig config;
  PlanPrecision precision = PlanPrecision::kAuto;
  std::optional<LargestAxis> largest;
  OutputFormat format = OutputFormat::kTable;
  double margin = PlanRequest{}.margin;
  bool measure = false;
  bool fresh = false;
  int64_t ranks = 0;  // 0: this device alone
  std::string bandwidth, latency = "20us";
  std::optional<Sharding> shard;
  int64_t shard_group = 0;
  std::string profile;
};

struct Request {
  TrainConfig config;
  PlanRequest request;
};

/// Returns the request given by the flags. The micro-batch is fixed if the
/// given sizes determine it; a global batch alone leaves it to the planner.
Request request_of(const PlanFlags& flags) {
  Request asked{flags.config, {}};
  TrainConfig& config = asked.config;
  PlanRequest& request = asked.request;
  const torch::Device device = device_of(config.device);
  config.device = device.str();
  request.memory =
      config.memory_limit > 0 ? config.memory_limit : available_memory(device);
  config.memory_limit = 0;
  request.margin = flags.margin;
  if (flags.precision == PlanPrecision::kAuto) {
    request.precisions = {Precision::kFp32, Precision::kBf16};
  } else {
    request.precisions = {from_text<Precision>(to_text(flags.precision))};
  }
  config.precision = request.precisions.front();
  if (config.plans_schedule() || config.plans_if_long()) {
    config.recompute = "none";  // replaced by the plan
  } else {
    request.strategy = config.recompute;
  }
  if (config.data.empty()) config.data = default_data(config);
  config.evaluate = false;

  const bool fixed = config.batch > 0 || config.accumulate > 0;
  config.resolve();
  request.global_batch = config.global_batch;
  if (fixed) {
    request.micro_batch = config.batch;
  } else {
    config.batch = config.accumulate = 0;
  }
  return asked;
}

/// Parses "200GB/s" or "100Gbit/s" to bytes per millisecond.
double parse_bandwidth(const std::string& text) {
  std::string rest = text;
  const auto drop = [&rest](const char* end) {
    const bool ends = rest.ends_with(end);
    if (ends) rest.resize(rest.size() - std::string_view(end).size());
    return ends;
  };
  if (!drop("/s")) {
    throw CLI::ValidationError("--bandwidth",
                               "expected one such as 200GB/s "
                               "or 100Gbit/s, got " +
                                   in_quotes(text));
  }
  const double bits = drop("bit") ? 8 : 1;
  if (bits > 1) rest += "B";
  try {
    const double bytes = static_cast<double>(parse_bytes(rest));
    if (bytes >= bits) return bytes / bits / 1000;
  } catch (const Error&) {
    // Not a size; reported below.
  }
  throw CLI::ValidationError(
      "--bandwidth",
      "expected one such as 200GB/s or 100Gbit/s, got " + in_quotes(text));
}

/// Parses "20us", "1.5ms" or "1s" to milliseconds.
double parse_latency(const std::string& text) {
  size_t end = 0;
  double value = -1;
  try {
    value = std::stod(text, &end);
  } catch (const std::exception&) {
    end = 0;
  }
  const std::string unit = text.substr(end);
  const double scale = unit == "us"   ? 1e-3
                       : unit == "ms" ? 1
                       : unit == "s"  ? 1e3
                                      : 0;
  if (scale == 0 || !(value >= 0) || !std::isfinite(value)) {
    throw CLI::ValidationError(
        "--latency",
        "expected a time such as 20us or 1ms, got " + in_quotes(text));
  }
  return value * scale;
}

template <class... What>
void print_as(OutputFormat format, const What&... what) {
  if (format == OutputFormat::kJson) {
    std::cout << to_json(what...) << std::endl;
  } else {
    std::cout << to_text(what...) << std::flush;
  }
}

int plan_cluster_with(const PlanFlags& flags, const PlanningOptions& options) {
  if (flags.bandwidth.empty()) {
    throw CLI::ValidationError(
        "--ranks", "needs --bandwidth, that of the network between ranks");
  }
  Request asked = request_of(flags);
  ClusterRequest request;
  request.plan = asked.request;
  request.ranks = static_cast<int>(flags.ranks);
  request.network = {parse_bandwidth(flags.bandwidth),
                     parse_latency(flags.latency)};
  request.shard = flags.shard;
  request.shard_group = static_cast<int>(flags.shard_group);
  std::optional<ClusterPlan> plan;
  if (flags.profile.empty()) {
    if (asked.request.precisions.size() > 1) {
      request.plan.precisions = {Precision::kBf16};
      asked.config.precision = Precision::kBf16;
    }
    PlanningOptions within = options;
    within.memory = asked.request.memory;
    plan = TrainingPlanner(asked.config, within).plan(request);
  } else {
    std::unique_ptr<CostSource> costs;
    try {
      const std::string text = read_text(flags.profile);
      costs = saved_costs(text);
      request.plan.precisions = {profile_from_json(text).precision};
    } catch (const c10::Error& error) {
      throw CLI::ValidationError(
          "--profile",
          fmt::format("{}: {}", flags.profile, user_message(error)));
    } catch (const Error& error) {
      throw CLI::ValidationError("--profile", user_message(error));
    }
    plan = plan_cluster(request, *costs);
  }
  print_as(flags.format, *plan);
  return plan->levels.front().feasible ? 0 : 1;
}

int plan_with(const PlanFlags& flags) {
  if (flags.measure && flags.largest) {
    throw CLI::ValidationError(
        "--measure", "trains by a plan; --largest makes none, so give one");
  }
  const Request asked = request_of(flags);
  PlanningOptions options;
  options.fresh = flags.fresh;
  options.progress = [](const std::string& text) { print_text(text + "\n"); };
  if (flags.ranks > 0) return plan_cluster_with(flags, options);
  if (flags.largest) {
    const Largest largest =
        find_largest(asked.config, *flags.largest, asked.request, options);
    print_as(flags.format, largest);
    return largest.value > 0 ? 0 : 1;
  }
  const PlanResult result = plan_training(asked.config, asked.request, options);
  std::optional<PlanMeasurement> measured;
  if (flags.measure && result.feasible) {
    options.progress("training by the plan");
    measured = measure_plan(asked.config, result.plan, result.request.memory);
  }
  print_as(flags.format, result, measured);
  return result.feasible ? 0 : 1;
}

/// Sets the help texts of flags whose defaults the planner chooses.
void describe_choices(CLI::App& plan) {
  plan.get_option("--batch")->description(
      "Samples per micro-batch (default: chosen)");
  plan.get_option("--accumulate")
      ->description("Micro-batches per update (default: chosen)");
  plan.get_option("--global-batch")
      ->description("Samples per update (default 32)");
  plan.get_option("--recompute")
      ->description("optimal, or a strategy as for train");
  plan.get_option("--memory")
      ->description("Budget, such as 8GiB (default: the device's free memory)");
}

}  // namespace

void add_plan(CLI::App& app, Action& action) {
  auto flags = std::make_shared<PlanFlags>();
  flags->config.recompute = "optimal";
  CLI::App* plan = add_configured(
      app, "plan",
      "Choose micro-batch, accumulation, precision and schedule: the fastest "
      "that fit into a memory budget",
      flags->config, {"precision", "Evaluation", "Ranks", "Saving"});
  describe_choices(*plan);
  add_choice(*plan, "--precision", flags->precision,
             "auto: the faster of fp32 and bf16")
      ->group("Training");
  set_check(plan->add_option("--margin", flags->margin,
                             "Fraction of the budget, without weights and "
                             "optimizer state, that is left free")
                ->group("Machine")
                ->capture_default_str(),
            real_number(0, 0.9));
  plan->add_flag(
      "--measure", flags->measure,
      "Train a few updates by the plan and compare with the prediction");
  FieldInfo largest;
  largest.name = "largest";
  largest.help =
      "Find the largest value that fits, with and without techniques";
  largest.choices = names_of<LargestAxis>();
  largest.kind = FieldKind::kChoice;
  largest.check = one_of(largest.choices);
  add_field(*plan, largest, "", [flags](const std::string& text) {
    flags->largest = from_text<LargestAxis>(text);
  });
  plan->add_flag("--fresh", flags->fresh, "Ignore cached measurements");
  set_check(plan->add_option("--ranks", flags->ranks,
                             "Plan for this many devices like this one; "
                             "--memory is that of each")
                ->group("Ranks"),
            whole_number(1, 4096));
  plan->add_option("--bandwidth", flags->bandwidth,
                   "What each rank can send, such as 200GB/s or 100Gbit/s")
      ->group("Ranks")
      ->type_name("RATE");
  plan->add_option("--latency", flags->latency,
                   "Time of a short message, such as 20us")
      ->group("Ranks")
      ->type_name("TIME")
      ->capture_default_str();
  FieldInfo shard;
  shard.name = "shard";
  shard.group = "Ranks";
  shard.help = "What is divided among ranks (default: the fastest that fits)";
  shard.choices = names_of<Sharding>();
  shard.kind = FieldKind::kChoice;
  shard.check = one_of(shard.choices);
  add_field(*plan, shard, "", [flags](const std::string& text) {
    flags->shard = from_text<Sharding>(text);
  });
  set_check(plan->add_option("--shard-group", flags->shard_group,
                             "Ranks that share one copy of the state (0: all)")
                ->group("Ranks"),
            whole_number(0, 4096));
  plan->add_option("--profile", flags->profile,
                   "With --ranks: take the costs from this file, one of "
                   "~/.cache/reprise/profiles on a machine that planned")
      ->group("Ranks")
      ->type_name("FILE")
      ->check(CLI::ExistingFile.description(""));
  add_format_flag(*plan, flags->format);
  plan->footer(std::string("Takes the flags of train. Measurements are kept in "
                           "~/.cache/reprise/profiles.\n"
                           "Status 1 also means that nothing fits.\n") +
               kStatuses);
  plan->callback(
      [flags, &action] { action = [flags] { return plan_with(*flags); }; });
}

}  // namespace reprise::command
