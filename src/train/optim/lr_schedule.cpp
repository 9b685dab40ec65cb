#include <reprise/train/optimizer.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace reprise {
namespace {

void check(const LrScheduleOptions& options) {
  TORCH_CHECK(std::isfinite(options.base) && options.base >= 0,
              "[rate_at] expected a base of 0 or more, got ", options.base);
  TORCH_CHECK(options.warmup_steps >= 0,
              "[rate_at] expected warmup_steps of 0 or more, got ",
              options.warmup_steps);
  if (options.schedule == LrScheduleKind::kConstant) return;
  TORCH_CHECK(options.total_steps > options.warmup_steps,
              "[rate_at] expected total_steps above the ", options.warmup_steps,
              " of the warm-up for cosine, got ", options.total_steps);
  TORCH_CHECK(options.lowest >= 0 && options.lowest <= options.base,
              "[rate_at] expected lowest between 0 and the base ", options.base,
              ", got ", options.lowest);
}

}  // namespace

double rate_at(const LrScheduleOptions& options, int64_t step) {
  check(options);
  TORCH_CHECK(step >= 0, "[rate_at] expected a step of 0 or more, got ", step);
  if (step < options.warmup_steps) {
    return options.base * double(step + 1) / double(options.warmup_steps);
  }
  if (options.schedule == LrScheduleKind::kConstant) return options.base;
  const double done =
      std::min(1.0, double(step - options.warmup_steps) /
                        double(options.total_steps - options.warmup_steps));
  return options.lowest + (options.base - options.lowest) *
                              (1 + std::cos(std::numbers::pi * done)) / 2;
}

double scale_rate(double rate, LrScaling scaling, double batch,
                  double base_batch) {
  if (scaling == LrScaling::kNone) return rate;
  TORCH_CHECK(std::isfinite(batch) && batch > 0 && std::isfinite(base_batch) &&
                  base_batch > 0,
              "[scale_rate] expected batches above 0, got ", batch, " and ",
              base_batch);
  const double ratio = batch / base_batch;
  return rate * (scaling == LrScaling::kLinear ? ratio : std::sqrt(ratio));
}

}  // namespace reprise
