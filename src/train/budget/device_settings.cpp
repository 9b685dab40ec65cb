#include "train/budget/device_settings.h"

#include "compat/cuda.h"
#include "compat/cuda_graph.h"
#include "compat/denormals.h"
#include "data/batch_check.h"
#include "train/budget/model_state_guard.h"
#include "train/budget/schedule_timer.h"
#include "train/step/oom_retry.h"

#include <reprise/memory/meter.h>
#include <reprise/recompute/strategy.h>

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

namespace reprise::detail {
namespace {

/// Fewest micro-batches of a training that measures: the measurements take about 30.
constexpr int64_t kWorthMeasuring = 300;
/// Smallest gain for which cuDNN's algorithms are tried: they may differ from run to run,
/// and results with them in their last bits.
constexpr double kWorthAutotuning = 0.99;

bool has_convolutions(const Model& model) {
  const auto parameters = model.root->parameters();
  return std::any_of(parameters.begin(), parameters.end(),
                     [](const auto& p) { return p.dim() == 4; });
}

DeviceSettings rule_of(const TrainOptions& options, torch::Device device) {
  const bool half = options.precision != Precision::kFp32;
  return {device.is_cuda() && half ? ImageLayout::kChannelsLast
                                   : ImageLayout::kPlanes,
          Autotune::kOff};
}

/// `preferred`, unless the options say otherwise.
DeviceSettings allowed(const TrainOptions& options, DeviceSettings preferred) {
  if (options.layout != ImageLayout::kAuto) preferred.layout = options.layout;
  if (options.autotune != Autotune::kAuto) {
    preferred.autotune = options.autotune;
  }
  return preferred;
}

void apply(TrainSetup& setup, const DeviceSettings& settings) {
  setup.options.layout = settings.layout;
  setup.options.autotune = settings.autotune;
  apply_settings(setup.model, setup.options, setup.device);
}

/// Times the micro-step with different settings.
class SettingsTrial {
 public:
  SettingsTrial(TrainSetup& setup, const SettleOptions& options)
      : setup_(setup),
        options_(options),
        given_(setup.options),
        guard_(setup, /*parameters=*/false) {}

  DeviceSettings choose() {
    DeviceSettings best =
        allowed(given_, {ImageLayout::kPlanes, Autotune::kOff});
    apply(setup_, best);
    const int64_t micro_batch = find_micro_batch();
    double best_ms = time(best, micro_batch);
    const auto consider = [&](DeviceSettings other, double factor) {
      other = allowed(given_, other);
      if (other == best) return;
      const double ms = time(other, micro_batch);
      if (ms >= best_ms * factor) return;
      best = other;
      best_ms = ms;
    };
    consider({ImageLayout::kChannelsLast, Autotune::kOff}, 1);
    if (options_.memory == 0) {
      consider({best.layout, Autotune::kOn}, kWorthAutotuning);
    }
    return best;
  }

 private:
  /// The micro-batch of the training, or the largest of 2, 4, 8, … that fits in memory.
  int64_t find_micro_batch() const {
    const int64_t wanted =
        given_.batch > 0 ? given_.batch : std::min<int64_t>(given_.share(), 32);
    const auto cuda = compat::cuda_device_memory(setup_.device.index());
    const int64_t limit = options_.memory > 0
                              ? options_.memory
                              : cuda.free + live_bytes(setup_.device);
    int64_t good = std::min<int64_t>(wanted, 2);
    for (int64_t size = good;; size = std::min(2 * size, wanted)) {
      const auto peak = peak_of(size);
      if (!peak) return good;
      good = size;
      if (size == wanted || 2 * *peak > limit) return good;
    }
  }

  /// Peak of one micro-step in bytes; nullopt if it runs out of memory.
  std::optional<int64_t> peak_of(int64_t micro_batch) const {
    MemoryMeter meter(setup_.device);
    if (out_of_memory_in([&] { run(micro_batch, 1, false); })) {
      compat::empty_cuda_cache();
      return std::nullopt;
    }
    return meter.peak_bytes();
  }

  double time(const DeviceSettings& settings, int64_t micro_batch) {
    apply(setup_, settings);
    double ms = std::numeric_limits<double>::infinity();
    const bool graph = given_.graph != GraphMode::kOff;
    const bool failed =
        out_of_memory_in([&] { ms = run(micro_batch, 3, graph); }).has_value();
    compat::release_workspaces(setup_.device);
    compat::empty_cuda_cache();
    if (options_.say) {
      options_.say(
          fmt::format("layout {}, autotune {}: {}", to_text(settings.layout),
                      to_text(settings.autotune),
                      failed ? "out of memory"
                             : fmt::format("{:.3g} ms per micro-batch of {}",
                                           ms, micro_batch)));
    }
    return ms;
  }

  double run(int64_t micro_batch, int rows, bool graph) const {
    const Schedule schedule = make_schedule("none", setup_.model.chain.size());
    ScheduleTimer::Trial trial{.precision = given_.precision,
                               .micro_batch = micro_batch,
                               .schedule = schedule,
                               .accumulate = given_.accumulate > 1,
                               .graph = graph};
    return ScheduleTimer(setup_)
        .time(trial, largest_batch(*setup_.data.train, micro_batch),
              {.warm_up = true, .rows = rows})
        .ms;
  }

  TrainSetup& setup_;
  const SettleOptions& options_;
  TrainOptions given_;
  ModelStateGuard guard_;
};

DeviceSettings measured(TrainSetup& setup, const SettleOptions& options) {
  const compat::FlushDenormals flush(setup.device);
  const compat::GraphStreamScope stream(setup.device,
                                        setup.options.graph != GraphMode::kOff);
  const DeviceSettings chosen = SettingsTrial(setup, options).choose();
  if (options.say) {
    options.say(fmt::format("chosen: layout {}, autotune {}",
                            to_text(chosen.layout), to_text(chosen.autotune)));
  }
  return chosen;
}

std::string pack(const DeviceSettings& settings) {
  return fmt::format("{} {}", to_text(settings.layout),
                     to_text(settings.autotune));
}

DeviceSettings unpack(const std::string& text) {
  const size_t space = text.find(' ');
  return {from_text<ImageLayout>(text.substr(0, space)),
          from_text<Autotune>(text.substr(space + 1))};
}

}  // namespace

int64_t micro_batches_of(const TrainSetup& setup) {
  const TrainOptions& options = setup.options;
  constexpr int64_t kEndless = std::numeric_limits<int64_t>::max();
  if (options.seconds > 0) return kEndless;
  const int64_t window = std::max<int64_t>(options.global_batch, 1);
  int64_t windows = options.steps;
  if (windows == 0) {
    const int64_t epoch =
        (setup.data.train->epoch_size() + window - 1) / window;
    windows = std::max<int64_t>(options.epochs, 1) * epoch;
  }
  return windows * std::max<int64_t>(options.accumulate, 1);
}

void settle_device_settings(TrainSetup& setup, Ranks& ranks,
                            const SettleOptions& options) {
  const TrainOptions& given = setup.options;
  const bool free =
      given.layout == ImageLayout::kAuto || given.autotune == Autotune::kAuto;
  if (!free) return;
  if (!setup.device.is_cuda() || !has_convolutions(setup.model)) {
    apply(setup, allowed(given, {ImageLayout::kPlanes, Autotune::kOff}));
    return;
  }
  DeviceSettings chosen = allowed(given, rule_of(given, setup.device));
  if (options.measure && micro_batches_of(setup) >= kWorthMeasuring) {
    std::string text;
    if (ranks.first()) text = pack(measured(setup, options));
    chosen = unpack(ranks.broadcast_text(text));
  }
  apply(setup, chosen);
  setup.settings = chosen;
}

}  // namespace reprise::detail
