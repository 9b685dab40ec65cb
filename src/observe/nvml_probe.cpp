#include "observe/clocks.h"
#include "observe/nvml.h"
#include "observe/parts.h"

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
constexpr size_t kMostSamples = 65536;  // no driver keeps as many
/// Buffered samples that do not come for so long do not come at all.
constexpr double kPatience_s = 3;
/// NVML's periods of sampling are from a sixth of a second to a second.
constexpr double kShortestPeriod_s = 1.0 / 6;
/// Samples that are further apart have a hole between them.
constexpr double kLongestPeriod_s = 1.5;
/// Stamps that are further off are not of the clock that they should be of.
constexpr double kStampsOff_s = 3600;
/// A rate may be of the whole last second: an earlier one is of the time before.
constexpr double kSettledRate_s = 1;
constexpr double kRateEvery_s = 0.25;
constexpr unsigned kInstantPower = 186;  // NVML_FI_DEV_POWER_INSTANT

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
    instant_power_ = nvml_->get_fields != nullptr;
    last_new_s_ = steady_seconds();
    if (buffered_) new_samples(last_new_s_);
  }

  std::string source() const override { return "nvml"; }

  void restart() override {
    power_.pace.reset();
    clock_.pace.reset();
    const double now_s = steady_seconds();
    rate_.pace.took(now_s, 0);  // one of now would be of the time before
    restarted_s_ = last_new_s_ = now_s;
    // Samples of parts before are kept; those without a time are dropped.
    if (buffered_) new_samples(now_s);
    utilisation_.pace.reset();
    stamped_ = true;
    parts_.open(realtime_seconds());
  }

  void stop() override {
    parts_.close(realtime_seconds());
    // The look that follows is the last one of the part: it leaves nothing out.
    utilisation_.pace.reset();
    rate_.pace.reset();
  }

  DeviceSample sample() override {
    const double now_s = steady_seconds();
    return {memory(), utilisation(now_s), power(now_s), clock(now_s),
            std::exchange(past_, {})};
  }

  bool more_to_come() override {
    const auto end_s = parts_.end_s();
    if (!buffered_ || !stamped_ || !end_s) return false;
    new_samples(steady_seconds());
    return buffered_ && stamped_ && utilisation_.code == kNvmlSuccess &&
           1e-6 * static_cast<double>(last_seen_us_) < *end_s;
  }

  std::vector<PastUtilisation> rest() override {
    if (!told_ && rates_.empty() && early_rate_) rates_ = {*early_rate_};
    rates_have_to_do();
    return std::exchange(past_, {});
  }

  ProbeAvailability visible() override {
    power_ = clock_ = {};
    const double now_s = steady_seconds();
    memory();
    read_rate(now_s);
    NvmlReturn utilisation_code = rate_.code;
    if (rate_.code != kNvmlSuccess && nvml_->get_samples != nullptr) {
      new_samples(now_s);
      if (utilisation_.code == kNvmlSuccess) utilisation_code = kNvmlSuccess;
    }
    const Availability utilisation = sight(utilisation_code);
    power(now_s);
    clock(now_s);
    return {sight(memory_code_), utilisation, sight(power_.code),
            sight(clock_.code)};
  }

 private:
  Availability sight(NvmlReturn code) const {
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
  /// the finer samples that it is made of, and gives them out some time later,
  /// many at once, but each with its time: that says of which part they are.
  /// Where there are none, the rate has to do.
  std::optional<double> utilisation(double now_s) {
    if (buffered_ && utilisation_.due(now_s)) {
      const auto arrived = new_samples(now_s);
      if (arrived && !parts_.empty()) told_ = true;
      if (arrived) return arrived;
    }
    if (buffered_ && told_) return std::nullopt;
    return rate(now_s);
  }

  /// Takes the driver's new samples. The mean of those whose stamps are no
  /// times: all that is known of them is that they came.
  std::optional<double> new_samples(double now_s) {
    size_t count = 0;
    int type = 0;
    utilisation_.read(now_s, [&] { return read_samples(count, type); });
    std::sort(samples_.begin(), samples_.begin() + static_cast<long>(count),
              [](const NvmlSample& a, const NvmlSample& b) {
                return a.time_us < b.time_us;
              });
    if (count > 0) {
      stamped_ =
          std::abs(1e-6 * static_cast<double>(samples_[count - 1].time_us) -
                   realtime_seconds()) < kStampsOff_s;
    }
    double sum = 0;
    int used = 0;
    for (size_t i = 0; i < count; ++i) {
      const NvmlSample& sample = samples_[i];
      if (sample.time_us <= last_seen_us_) continue;
      const auto before_us = std::exchange(last_seen_us_, sample.time_us);
      const double value = type == kValueIsDouble ? sample.value.real
                           : type == kValueIsLong || type == kValueIsLongLong
                               ? static_cast<double>(sample.value.large)
                               : static_cast<double>(sample.value.number);
      if (type > kValueIsLongLong || type < 0 || value < 0 || value > 100) {
        continue;  // no percentage, whatever it is
      }
      last_new_s_ = now_s;
      if (stamped_) {
        take(1e-6 * static_cast<double>(sample.time_us),
             1e-6 * static_cast<double>(sample.time_us - before_us), value);
      } else {
        sum += value;
        ++used;
      }
    }
    if (utilisation_.given_up || now_s - last_new_s_ > kPatience_s) {
      buffered_ = false;
      rates_have_to_do();
    }
    if (used == 0) return std::nullopt;
    return sum / used;
  }

  /// A sample counts if most of its period is training; it stands for that.
  void take(double stamp_s, double period_s, double percent) {
    if (period_s > kLongestPeriod_s) period_s = kShortestPeriod_s;
    const double from_s = parts_.training_s(stamp_s - period_s);
    const double to_s = parts_.training_s(stamp_s);
    if (to_s - from_s <= 0.5 * period_s) return;
    past_.push_back({from_s, to_s, percent});
    told_ = true;
    rates_.clear();
  }

  NvmlReturn read_samples(size_t& found, int& type) {
    auto count = static_cast<unsigned>(samples_.size());
    const NvmlReturn code =
        nvml_->get_samples(device_, kGpuUtilizationSamples, last_seen_us_,
                           &type, &count, samples_.data());
    if (code == kNvmlNotFound) return kNvmlSuccess;  // nothing new
    if (code == kNvmlInsufficientSize && samples_.size() < kMostSamples) {
      samples_.resize(
          std::clamp<size_t>(count, 2 * samples_.size(), 2 * kMostSamples));
      return kNvmlSuccess;  // next time
    }
    if (code == kNvmlSuccess) found = std::min<size_t>(count, samples_.size());
    return code;
  }

  /// While samples may still come, rates are only remembered.
  std::optional<double> rate(double now_s) {
    if (parts_.empty() || !rate_.due(now_s)) return std::nullopt;
    const auto percent = read_rate(now_s);
    if (!percent) return std::nullopt;
    const double t_s = parts_.training_s(realtime_seconds());
    if (now_s - restarted_s_ < kSettledRate_s) {
      early_rate_ = {0, t_s, *percent};
      return std::nullopt;
    }
    if (!buffered_) {
      told_ = true;
      return percent;
    }
    rates_.push_back({rates_.empty() ? 0 : rates_.back().to_s, t_s, *percent});
    return std::nullopt;
  }

  void rates_have_to_do() {
    if (!told_ && !rates_.empty()) {
      past_.insert(past_.end(), rates_.begin(), rates_.end());
      told_ = true;
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

  /// From Ampere on NVML's power usage is a mean over the last second; newer
  /// drivers have that of the moment too.
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
      instant_power_ = false;  // one run, one kind of power
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
  Reading rate_{Pace(kRateEvery_s)};
  Parts parts_;
  bool buffered_ = false;               // the driver has samples
  bool stamped_ = true;                 // and those of this part have times
  bool told_ = false;                   // some utilisation of the parts
  bool instant_power_ = false;          // the driver has it
  std::vector<PastUtilisation> past_;   // since the last look
  std::vector<PastUtilisation> rates_;  // for when samples do not come
  std::optional<PastUtilisation> early_rate_;
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
  ProbeAvailability visible() override {
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
    return std::make_unique<BlindProbe>(std::move(reason));
  }
  return std::make_unique<NvmlProbe>(std::move(nvml), device);
}

}  // namespace reprise::detail
