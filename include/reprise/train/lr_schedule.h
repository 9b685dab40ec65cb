#pragma once

#include <cstdint>
#include <string>

namespace reprise {

/// The learning rate of each update: a linear warm-up from 0 to the base, then
/// constant or a half cosine down to `lowest`.
struct LrScheduleOptions {
  double base = 1e-3;
  std::string schedule = "constant";  ///< constant, cosine
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;  ///< of the whole training; cosine needs it
  double lowest = 0;
};

/// Of update `step`, counted from 0. During warm-up base × (step + 1) /
/// warmup_steps; cosine is at `lowest` from update total_steps on. Throws
/// c10::Error on an unknown schedule, and where cosine has no steps after the
/// warm-up or an option is out of range.
double rate_at(const LrScheduleOptions& options, int64_t step);

/// The rate for a global batch other than the one it was tuned for: "linear":
/// × batch / base_batch, "sqrt": × √(batch / base_batch), "": as it is.
/// Throws c10::Error on another rule, or a batch that is not above 0.
double scale_rate(double rate, const std::string& rule, double batch,
                  double base_batch);

}  // namespace reprise
