#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <string>
#include <vector>

namespace reprise::detail {

/// Detects reasons why the measured time of a training is misleading: waiting
/// for data, system time, other programs on the same cores, denormal numbers.
/// Such a time is an artifact of the machine or of the model's values, and must
/// not be published as the cost of a technique.
class TimeAudit {
 public:
  /// CPU time of the process in seconds.
  struct Usage {
    double user_s = 0, system_s = 0;
    /// Seconds that the calling thread was runnable while another program used
    /// its core. Empty if the system does not provide it.
    std::optional<double> queued_s{};
  };

  struct Finding {
    double seconds = 0;         ///< training time so far
    double waited_s = 0;        ///< part of it spent waiting for data
    double denormal_share = 0;  ///< share of denormal numbers in the gradients
    c10::Device device;
  };

  /// Called when the steady part of a training begins.
  void start(double seconds, double waited_s);

  /// Returns one sentence per reason found since start(). Empty if start() was
  /// not called or less than `kShortestS` seconds have passed since.
  std::vector<std::string> doubts(const Finding& finding) const;

  /// Seconds below which the clocks of the system are too coarse.
  static constexpr double kShortestS = 0.25;

 private:
  bool started_ = false;
  double seconds_ = 0;
  double waited_s_ = 0;
  Usage usage_;
};

/// Returns the sentences of TimeAudit::doubts() for the usage between two
/// points in time.
std::vector<std::string> time_doubts(const TimeAudit::Usage& used,
                                     const TimeAudit::Finding& finding);

}  // namespace reprise::detail
