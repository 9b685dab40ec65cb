// Tested by tests/observe/nvml_test.cpp.
#include "observe/clocks.h"
#include "observe/nvml.h"
#include "observe/training_intervals.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace reprise::detail {
namespace {

constexpr int kGpuUtilizationSamples = 1;  // nvmlSamplingType_t
constexpr int kSmClock = 1;                // nvmlClockType_t
constexpr int kValueIsDouble = 0;          // nvmlValueType_t
constexpr int kValueIsUnsigned = 1;
constexpr int kValueIsLong = 2;
constexpr int kValueIsLongLong = 3;
constexpr size_t kRoomForSamples = 256;
constexpr size_t kMostSamples = 65536;  // more than any driver keeps
/// If no buffered sample arrives for this long, the driver has none.
constexpr double kSampleTimeout_s = 3;
/// NVML's sampling period lies between 1/6 s and 1 s.
constexpr double kShortestPeriod_s = 1.0 / 6;
/// If samples are further apart, some are missing between them.
constexpr double kLongestPeriod_s = 1.5;
/// If timestamps differ more from the real-time clock, they use another clock.
constexpr double kMaxTimestampError_s = 3600;
/// A utilisation rate may cover the last second. An earlier one also covers the time
/// before the training.
constexpr double kSettledRate_s = 1;
constexpr double kRateEvery_s = 0.25;
constexpr unsigned kInstantPower = 186;  // NVML_FI_DEV_POWER_INSTANT

/// Whether the same request will always fail with this code.
bool is_permanent(NvmlReturn code) {
  return code == kNvmlNotSupported || code == kNvmlNoPermission ||
         code == kNvmlFunctionNotFound || code == kNvmlGpuIsLost ||
         code == kNvmlInvalidArgument;
}

/// A value read from the device, with a rate limit. Not read again after a permanent
/// error.
struct Reading {
  RateLimiter limiter;
  bool disabled = false;
  NvmlReturn code = kNvmlSuccess;  // of the last read

  template <class Read>
  void read(double now_s, Read&& body) {
    const double before = cpu_seconds(CLOCK_THREAD_CPUTIME_ID);
    code = body();
    disabled = is_permanent(code);
    limiter.record(now_s, cpu_seconds(CLOCK_THREAD_CPUTIME_ID) - before);
  }
  bool due(double now_s) const { return !disabled && limiter.due(now_s); }
};

class NvmlProbe final : public DeviceProbe {
 public:
  NvmlProbe(std::shared_ptr<Nvml> nvml, NvmlDevice device)
      : nvml_(std::move(nvml)), device_(device), samples_(kRoomForSamples) {
    buffered_ = nvml_->get_samples != nullptr;
    instant_power_ = nvml_->get_fields != nullptr;
    last_new_s_ = steady_seconds();
    if (buffered_) new_samples(last_new_s_);
  }

  std::string source() const override { return "nvml"; }

  void restart() override {
    power_.limiter.reset();
    clock_.limiter.reset();
    const double now_s = steady_seconds();
    rate_.limiter.record(now_s,
                         0);  // a rate read now would cover the time before
    restarted_s_ = last_new_s_ = now_s;
    // Samples of previous intervals are kept; those without timestamps are dropped.
    if (buffered_) new_samples(now_s);
    utilisation_.limiter.reset();
    timestamped_ = true;
    intervals_.open(realtime_seconds());
  }

  void stop() override {
    intervals_.close(realtime_seconds());
    // The next sample is the last one of the interval: it must read every value.
    utilisation_.limiter.reset();
    rate_.limiter.reset();
  }

  DeviceSample sample() override {
    const double now_s = steady_seconds();
    return {memory(), utilisation(now_s), power(now_s), clock(now_s),
            std::exchange(past_, {})};
  }

  bool has_pending() override {
    const auto end_s = intervals_.end_s();
    if (!buffered_ || !timestamped_ || !end_s) return false;
    new_samples(steady_seconds());
    return buffered_ && timestamped_ && utilisation_.code == kNvmlSuccess &&
           1e-6 * static_cast<double>(last_sample_us_) < *end_s;
  }

  std::vector<PastUtilisation> take_pending() override {
    if (!has_utilisation_ && rates_.empty() && early_rate_)
      rates_ = {*early_rate_};
    use_rates();
    return std::exchange(past_, {});
  }

  ProbeAvailability availability() override {
    power_ = clock_ = {};
    const double now_s = steady_seconds();
    memory();
    read_rate(now_s);
    NvmlReturn utilisation_code = rate_.code;
    if (rate_.code != kNvmlSuccess && nvml_->get_samples != nullptr) {
      new_samples(now_s);
      if (utilisation_.code == kNvmlSuccess) utilisation_code = kNvmlSuccess;
    }
    const Availability utilisation = availability_of(utilisation_code);
    power(now_s);
    clock(now_s);
    return {availability_of(memory_code_), utilisation,
            availability_of(power_.code), availability_of(clock_.code)};
  }

 private:
  Availability availability_of(NvmlReturn code) const {
    if (code == kNvmlSuccess) return {true, ""};
    return {false, code == kNvmlFunctionNotFound
                       ? "not supported by this driver"
                       : nvml_->error(code)};
  }

  /// Read in every sample, so that peaks are found.
  std::optional<int64_t> memory() {
    NvmlMemory memory;
    memory_code_ = nvml_->memory(device_, memory);
    if (memory_code_ != kNvmlSuccess) return std::nullopt;
    return static_cast<int64_t>(memory.used);
  }

  /// NVML defines utilisation as the fraction of time during which a kernel was
  /// running, over a sampling period of up to one second. A single rate would include
  /// time before the interval and repeat in many samples. The driver also buffers the
  /// finer samples from which it computes the rate. They arrive late and in batches,
  /// but have timestamps that assign them to an interval. The rate is used if there are
  /// none.
  std::optional<double> utilisation(double now_s) {
    if (buffered_ && utilisation_.due(now_s)) {
      const auto arrived = new_samples(now_s);
      if (arrived && !intervals_.empty()) has_utilisation_ = true;
      if (arrived) return arrived;
    }
    if (buffered_ && has_utilisation_) return std::nullopt;
    return rate(now_s);
  }

  /// Reads the driver's new samples. Returns the mean of those without valid
  /// timestamps, for which only the time of arrival is known.
  std::optional<double> new_samples(double now_s) {
    size_t count = 0;
    int type = 0;
    utilisation_.read(now_s, [&] { return read_samples(count, type); });
    std::sort(samples_.begin(), samples_.begin() + static_cast<long>(count),
              [](const NvmlSample& a, const NvmlSample& b) {
                return a.time_us < b.time_us;
              });
    if (count > 0) {
      timestamped_ =
          std::abs(1e-6 * static_cast<double>(samples_[count - 1].time_us) -
                   realtime_seconds()) < kMaxTimestampError_s;
    }
    double sum = 0;
    int used = 0;
    for (size_t i = 0; i < count; ++i) {
      const NvmlSample& sample = samples_[i];
      if (sample.time_us <= last_sample_us_) continue;
      const auto before_us = std::exchange(last_sample_us_, sample.time_us);
      const double value = type == kValueIsDouble ? sample.value.real
                           : type == kValueIsLong || type == kValueIsLongLong
                               ? static_cast<double>(sample.value.large)
                               : static_cast<double>(sample.value.number);
      if (type > kValueIsLongLong || type < 0 || value < 0 || value > 100) {
        continue;  // not a percentage
      }
      last_new_s_ = now_s;
      if (timestamped_) {
        add_past(1e-6 * static_cast<double>(sample.time_us),
                 1e-6 * static_cast<double>(sample.time_us - before_us), value);
      } else {
        sum += value;
        ++used;
      }
    }
    if (utilisation_.disabled || now_s - last_new_s_ > kSampleTimeout_s) {
      buffered_ = false;
      use_rates();
    }
    if (used == 0) return std::nullopt;
    return sum / used;
  }

  /// Uses a sample if most of its period is training time.
  void add_past(double timestamp_s, double period_s, double percent) {
    if (period_s > kLongestPeriod_s) period_s = kShortestPeriod_s;
    const double from_s = intervals_.training_s(timestamp_s - period_s);
    const double to_s = intervals_.training_s(timestamp_s);
    if (to_s - from_s <= 0.5 * period_s) return;
    past_.push_back({from_s, to_s, percent});
    has_utilisation_ = true;
    rates_.clear();
  }

  NvmlReturn read_samples(size_t& found, int& type) {
    auto count = static_cast<unsigned>(samples_.size());
    const NvmlReturn code =
        nvml_->get_samples(device_, kGpuUtilizationSamples, last_sample_us_,
                           &type, &count, samples_.data());
    if (code == kNvmlNotFound) return kNvmlSuccess;  // no new samples
    if (code == kNvmlInsufficientSize && samples_.size() < kMostSamples) {
      samples_.resize(
          std::clamp<size_t>(count, 2 * samples_.size(), 2 * kMostSamples));
      return kNvmlSuccess;  // retried with the larger buffer next time
    }
    if (code == kNvmlSuccess) found = std::min<size_t>(count, samples_.size());
    return code;
  }

  /// While samples may still arrive, rates are only stored.
  std::optional<double> rate(double now_s) {
    if (intervals_.empty() || !rate_.due(now_s)) return std::nullopt;
    const auto percent = read_rate(now_s);
    if (!percent) return std::nullopt;
    const double t_s = intervals_.training_s(realtime_seconds());
    if (now_s - restarted_s_ < kSettledRate_s) {
      early_rate_ = {0, t_s, *percent};
      return std::nullopt;
    }
    if (!buffered_) {
      has_utilisation_ = true;
      return percent;
    }
    rates_.push_back({rates_.empty() ? 0 : rates_.back().to_s, t_s, *percent});
    return std::nullopt;
  }

  void use_rates() {
    if (!has_utilisation_ && !rates_.empty()) {
      past_.insert(past_.end(), rates_.begin(), rates_.end());
      has_utilisation_ = true;
    }
    rates_.clear();
  }

  std::optional<double> read_rate(double now_s) {
    NvmlUtilization rates;
    rate_.read(now_s, [&] {
      return nvml_->get_utilization == nullptr
                 ? kNvmlFunctionNotFound
                 : nvml_->get_utilization(device_, &rates);
    });
    if (rate_.code != kNvmlSuccess) return std::nullopt;
    return rates.gpu;
  }

  std::optional<double> power(double now_s) {
    if (!power_.due(now_s)) return std::nullopt;
    unsigned milliwatts = 0;
    power_.read(now_s, [&] { return read_power(milliwatts); });
    if (power_.code != kNvmlSuccess) return std::nullopt;
    return milliwatts / 1000.0;
  }

  /// Since Ampere, NVML's power usage is a mean over the last second. Newer drivers
  /// also report the instantaneous power.
  NvmlReturn read_power(unsigned& milliwatts) {
    if (instant_power_) {
      NvmlField field;
      field.id = kInstantPower;
      const NvmlReturn code = nvml_->get_fields(device_, 1, &field);
      if (code == kNvmlSuccess && field.code == kNvmlSuccess &&
          field.type == kValueIsUnsigned && field.value.number > 0) {
        milliwatts = field.value.number;
        return code;
      }
      instant_power_ = false;  // do not mix both kinds in one run
    }
    return nvml_->get_power == nullptr ? kNvmlFunctionNotFound
                                       : nvml_->get_power(device_, &milliwatts);
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
  Reading rate_{RateLimiter(kRateEvery_s)};
  TrainingIntervals intervals_;
  bool buffered_ = false;  // the driver buffers samples
  bool timestamped_ =
      true;  // the samples of this interval have valid timestamps
  bool has_utilisation_ = false;  // some utilisation of the training is known
  bool instant_power_ = false;    // the driver reports instantaneous power
  std::vector<PastUtilisation> past_;   // since the last sample
  std::vector<PastUtilisation> rates_;  // used if no samples arrive
  std::optional<PastUtilisation> early_rate_;
  std::vector<NvmlSample> samples_;
  unsigned long long last_sample_us_ = 0;
  double last_new_s_ = 0, restarted_s_ = 0;
};

/// The probe of a device that cannot be read.
class UnavailableProbe : public DeviceProbe {
 public:
  explicit UnavailableProbe(std::string reason) : reason_(std::move(reason)) {}
  std::string source() const override { return "nvml"; }
  DeviceSample sample() override { return {}; }
  ProbeAvailability availability() override {
    const Availability none{false, reason_};
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
    return std::make_unique<UnavailableProbe>(std::move(reason));
  }
  return std::make_unique<NvmlProbe>(std::move(nvml), device);
}

}  // namespace reprise::detail
