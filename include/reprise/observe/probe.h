#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

/// What can be read of a device from outside, beside a training.
namespace reprise {

/// Utilisation over a stretch of the training that a device measured by itself
/// and told later.
struct PastUtilisation {
  double from_s = 0, to_s = 0;  ///< training time: that of the parts, added up
  double percent = 0;
};

/// One look at a device. What cannot be seen, or has nothing new since the last
/// look, is empty.
struct DeviceSample {
  std::optional<int64_t> memory_bytes;  ///< in use
  std::optional<double> utilisation;    ///< percent, since the look before
  std::optional<double> power_w;
  std::optional<double> clock_mhz;
  std::vector<PastUtilisation> past = {};  ///< new; any part's so far
};

/// Whether something can be seen, and why not.
struct Availability {
  bool seen = false;
  std::string reason;  ///< empty where it is seen
};

struct ProbeAvailability {
  Availability memory, utilisation, power, clock;
};

/// Reads one device. From any thread, but from one at a time.
class DeviceProbe {
 public:
  virtual ~DeviceProbe() = default;

  /// "nvml" or "process".
  virtual std::string source() const = 0;

  /// Does not throw for what cannot be read.
  virtual DeviceSample sample() = 0;

  /// A training part begins: utilisation counts from here on.
  virtual void restart() {}

  /// The part is over: what follows is not the training's. The next look is
  /// still taken for the part.
  virtual void stop() {}

  /// After the last stop(). Asks once more, and says whether the device may
  /// still tell of the parts later.
  virtual bool more_to_come() { return false; }

  /// What came since the last look, and what has to do where nothing came. Once,
  /// when nobody waits any longer.
  virtual std::vector<PastUtilisation> rest() { return {}; }

  /// Looks at everything once.
  virtual ProbeAvailability visible() = 0;
};

/// For "cpu": this process. Memory is what is resident, utilisation is in
/// percent of all cores that the process may use, power is that of the whole
/// processor (RAPL; most systems show it to root alone), the clock is the mean
/// of its cores.
///
/// For "cuda" or "cuda:N": the whole device through NVML, other processes
/// included. The library is loaded at run time: libnvidia-ml.so.1, or the file
/// that the environment's REPRISE_NVML names. Where there is none the probe sees
/// nothing and says why. Asks CUDA which device N is; that starts the driver,
/// but takes no memory on the device. Do not fork and use CUDA afterwards.
///
/// Throws c10::Error on other devices.
std::unique_ptr<DeviceProbe> make_probe(const std::string& device);

}  // namespace reprise
