#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <string>
#include <vector>

namespace reprise::detail {

/// Looks for reasons why the time of a training is not that of training: waiting for
/// data, the kernel's work, other programs on the same cores, denormal numbers.
///
/// A figure of time that rests on one of these is an artefact of the machine or of the
/// model's values, and must not be published as the cost of a technique.
class TimeAudit {
 public:
  /// What the process has used so far, in seconds.
  struct Usage {
    double user_s = 0, system_s = 0;
    /// The calling thread was ready to run, but another program had its core. Nothing
    /// if the system does not say.
    std::optional<double> queued_s{};
  };

  struct Finding {
    double seconds = 0;         ///< training time so far
    double waited_s = 0;        ///< of these, for data
    double denormal_share = 0;  ///< among the gradients' values
    c10::Device device;
  };

  /// The steady part of a training begins.
  void start(double seconds, double waited_s);

  /// One sentence for each reason found since start(); empty if it was not called or
  /// less than `kShortestS` have passed.
  std::vector<std::string> doubts(const Finding& finding) const;

  /// Below this the clocks are too coarse to tell.
  static constexpr double kShortestS = 0.25;

 private:
  bool started_ = false;
  double seconds_ = 0;
  double waited_s_ = 0;
  Usage usage_;
};

/// The sentences for the differences between two moments.
std::vector<std::string> time_doubts(const TimeAudit::Usage& used,
                                     const TimeAudit::Finding& finding);

}  // namespace reprise::detail
