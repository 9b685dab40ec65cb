#pragma once

#include <reprise/base/enum_text.h>

#include <cstdint>

namespace reprise {

/// Course of the learning rate after the warm-up.
enum class LrScheduleKind { kConstant, kCosine };

template <>
struct EnumText<LrScheduleKind> {
  static constexpr std::array<std::string_view, 2> names{"constant", "cosine"};
};

/// Learning rate of each update: a linear warm-up from 0 to `base`, then constant
/// or a half cosine down to `lowest`.
struct LrScheduleOptions {
  double base = 1e-3;
  LrScheduleKind schedule = LrScheduleKind::kConstant;
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;  ///< updates of the whole training; used by cosine
  double lowest = 0;        ///< last learning rate of cosine
};

/// Learning rate of update `step`, counted from 0: base × (step + 1) /
/// warmup_steps during the warm-up; `lowest` from update total_steps on with
/// cosine. Throws c10::Error if an option is out of range or if cosine has no
/// updates after the warm-up.
double rate_at(const LrScheduleOptions& options, int64_t step);

/// How the learning rate depends on the global batch.
enum class LrScaling { kNone, kLinear, kSqrt };

template <>
struct EnumText<LrScaling> {
  static constexpr std::array<std::string_view, 3> names{"none", "linear",
                                                         "sqrt"};
};

/// Learning rate for a global batch of `batch`, given one tuned for `base_batch`:
/// rate × batch / base_batch (linear), rate × √(batch / base_batch) (sqrt) or
/// `rate`. Throws c10::Error if a batch is not above 0.
double scale_rate(double rate, LrScaling scaling, double batch,
                  double base_batch);

}  // namespace reprise
