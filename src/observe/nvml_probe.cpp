#include "clocks.h"
#include "nvml.h"

#include <algorithm>
#include <utility>

namespace reprise::detail {
namespace {

constexpr int kGpuUtilizationSamples = 1;  // nvmlSamplingType_t
constexpr int kSmClock = 1;                // nvmlClockType_t
constexpr int kValueIsDouble = 0;          // nvmlValueType_t
constexpr int kValueIsLong = 2;
constexpr int kValueIsLongLong = 3;
constexpr size_t kRoomForSamples = 256;
/// Buffered samples that do not come for so long do not come at all.
constexpr double kPatience_s = 3;
/// NVML's shortest period for a rate: an earlier one is of the time before.
constexpr double kFirstRate_s = 1.0 / 6;

/// What was asked in vain and would be again.
bool is_final(NvmlReturn code) {
  return code == kNvmlNotSupported || code == kNvmlNoPermission ||
         code == kNvmlFunctionNotFound || code == kNvmlGpuIsLost ||
         code == kNvmlInvalidArgument;
}

/// One thing that is read of a device: how often, and whether at all.
struct Reading {
  Pace pace;
  bool given_up = false;
  NvmlReturn code = kNvmlSuccess;  // of the last read

  template <class Read>
  void read(double now_s, Read&& body) {
    const double before = cpu_seconds(CLOCK_THREAD_CPUTIME_ID);
    code = body();
    given_up = is_final(code);
    pace.took(now_s, cpu_seconds(CLOCK_THREAD_CPUTIME_ID) - before);
  }
  bool due(double now_s) const { return !given_up && pace.due(now_s); }
};

class NvmlProbe final : public DeviceProbe {
 public:
  NvmlProbe(std::shared_ptr<Nvml> nvml, NvmlDevice device)
      : nvml_(std::move(nvml)), device_(device), samples_(kRoomForSamples) {
    buffered_ = nvml_->get_samples != nullptr;
    NvmlProbe::restart();
  }

  std::string source() const override { return "nvml"; }

  void restart() override {
    utilisation_.pace.reset();
    power_.pace.reset();
    clock_.pace.reset();
    const double now_s = steady_seconds();
    restarted_s_ = last_new_s_ = now_s;
    utilisation(now_s);  // what the driver has from before is dropped
    utilisation_.pace.reset();
  }

  DeviceSample sample() override {
    const double now_s = steady_seconds();
    return {memory(), utilisation(now_s), power(now_s), clock(now_s)};
  }

  Visible visible() override {
    utilisation_ = power_ = clock_ = {};
    const double now_s = steady_seconds();
    memory();
    rates(now_s);
    if (utilisation_.code != kNvmlSuccess && nvml_->get_samples != nullptr) {
      std::optional<double> mean;
      if (new_samples(mean) == kNvmlSuccess) utilisation_ = {};
    }
    const Sight utilisation = sight(utilisation_.code);
    power(now_s);
    clock(now_s);
    return {sight(memory_code_), utilisation, sight(power_.code),
            sight(clock_.code)};
  }

 private:
  Sight sight(NvmlReturn code) const {
    if (code == kNvmlSuccess) return {true, ""};
    return {false, code == kNvmlFunctionNotFound ? "not in this driver"
                                                 : nvml_->error(code)};
  }

  /// At every look: peaks are what looks are for.
  std::optional<int64_t> memory() {
    NvmlMemory memory;
    memory_code_ = nvml_->memory(device_, memory);
    if (memory_code_ != kNvmlSuccess) return std::nullopt;
    return static_cast<int64_t>(memory.used);
  }

  /// NVML's utilisation is the share of time with a kernel running, over a
  /// sampling period of its own, up to a second. A single rate would reach back
  /// to before the training part and be the same in many looks. The driver keeps
  /// the finer samples that it is made of: those that are new since the last look
  /// are taken. Where there are none, the rate has to do.
  std::optional<double> utilisation(double now_s) {
    if (!utilisation_.due(now_s)) return std::nullopt;
    if (!buffered_) {
      if (now_s - restarted_s_ < kFirstRate_s) return std::nullopt;
      return rates(now_s);
    }
    std::optional<double> mean;
    utilisation_.read(now_s, [&] { return new_samples(mean); });
    if (mean) last_new_s_ = now_s;
    if (utilisation_.given_up || now_s - last_new_s_ > kPatience_s) {
      buffered_ = false;
      utilisation_ = {};
    }
    return mean;
  }

  /// Success without a mean: nothing new.
  NvmlReturn new_samples(std::optional<double>& mean) {
    int type = 0;
    auto count = static_cast<unsigned>(samples_.size());
    NvmlReturn code =
        nvml_->get_samples(device_, kGpuUtilizationSamples, last_seen_us_,
                           &type, &count, samples_.data());
    if (code == kNvmlNotFound) return kNvmlSuccess;
    if (code == kNvmlInsufficientSize) {
      samples_.resize(std::max<size_t>(count, 2 * samples_.size()));
      return kNvmlSuccess;  // next time
    }
    if (code != kNvmlSuccess) return code;
    double sum = 0;
    int used = 0;
    const auto before_us = last_seen_us_;
    for (size_t i = 0; i < std::min<size_t>(count, samples_.size()); ++i) {
      const NvmlSample& sample = samples_[i];
      if (sample.time_us <= before_us) continue;
      last_seen_us_ = std::max(last_seen_us_, sample.time_us);
      const double value = type == kValueIsDouble ? sample.value.real
                           : type == kValueIsLong || type == kValueIsLongLong
                               ? static_cast<double>(sample.value.large)
                               : static_cast<double>(sample.value.number);
      if (type > kValueIsLongLong || type < 0 || value < 0 || value > 100) {
        continue;  // no percentage, whatever it is
      }
      sum += value;
      ++used;
    }
    if (used > 0) mean = sum / used;
    return code;
  }

  std::optional<double> rates(double now_s) {
    NvmlUtilization rates;
    utilisation_.read(now_s, [&] {
      return nvml_->get_utilization == nullptr
                 ? kNvmlFunctionNotFound
                 : nvml_->get_utilization(device_, &rates);
    });
    if (utilisation_.code != kNvmlSuccess) return std::nullopt;
    return rates.gpu;
  }

  /// From Ampere on a mean over the last second.
  std::optional<double> power(double now_s) {
    if (!power_.due(now_s)) return std::nullopt;
    unsigned milliwatts = 0;
    power_.read(now_s, [&] {
      return nvml_->get_power == nullptr
                 ? kNvmlFunctionNotFound
                 : nvml_->get_power(device_, &milliwatts);
    });
    if (power_.code != kNvmlSuccess) return std::nullopt;
    return milliwatts / 1000.0;
  }

  std::optional<double> clock(double now_s) {
    if (!clock_.due(now_s)) return std::nullopt;
    unsigned mhz = 0;
    clock_.read(now_s, [&] {
      return nvml_->get_clock == nullptr
                 ? kNvmlFunctionNotFound
                 : nvml_->get_clock(device_, kSmClock, &mhz);
    });
    if (clock_.code != kNvmlSuccess) return std::nullopt;
    return mhz;
  }

  const std::shared_ptr<Nvml> nvml_;
  const NvmlDevice device_;
  NvmlReturn memory_code_ = kNvmlSuccess;
  Reading utilisation_, power_, clock_;
  bool buffered_ = false;
  std::vector<NvmlSample> samples_;
  unsigned long long last_seen_us_ = 0;
  double last_new_s_ = 0, restarted_s_ = 0;
};

/// Of a device that cannot be looked at.
class BlindProbe : public DeviceProbe {
 public:
  explicit BlindProbe(std::string reason) : reason_(std::move(reason)) {}
  std::string source() const override { return "nvml"; }
  DeviceSample sample() override { return {}; }
  Visible visible() override {
    const Sight none{false, reason_};
    return {none, none, none, none};
  }

 private:
  std::string reason_;
};

}  // namespace

std::unique_ptr<DeviceProbe> make_nvml_probe(std::shared_ptr<Nvml> nvml,
                                             NvmlDevice device,
                                             std::string reason) {
  if (nvml == nullptr || device == nullptr) {
    return std::make_unique<BlindProbe>(std::move(reason));
  }
  return std::make_unique<NvmlProbe>(std::move(nvml), device);
}

}  // namespace reprise::detail
