#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace reprise {

/// Utilisation over an interval of the training, measured by the device and
/// reported with a delay.
struct PastUtilisation {
  /// Training time in seconds, which excludes the paused intervals.
  double from_s = 0, to_s = 0;
  double percent = 0;
};

/// One sample of a device. A value is empty if it is not available or not new
/// since the previous sample.
struct DeviceSample {
  std::optional<int64_t> memory_bytes;  ///< memory in use
  std::optional<double> utilisation;    ///< percent, since the previous sample
  std::optional<double> power_w;
  std::optional<double> clock_mhz;
  /// Delayed values that have arrived since the previous sample.
  std::vector<PastUtilisation> past = {};
};

/// Whether a value can be read and, if not, why.
struct Availability {
  bool available = false;
  std::string reason;  ///< empty if available
};

struct ProbeAvailability {
  Availability memory, utilisation, power, clock;
};

/// Reads the state of one device. May be used from any thread, by one at a time.
class DeviceProbe {
 public:
  virtual ~DeviceProbe() = default;

  /// The source of the values: "nvml" or "process".
  virtual std::string source() const = 0;

  /// Takes one sample. Does not throw for values that cannot be read.
  virtual DeviceSample sample() = 0;

  /// Starts an interval of the training. Utilisation is measured from here on.
  virtual void restart() {}

  /// Ends the interval. The next sample still belongs to it.
  virtual void stop() {}

  /// To be called after the last stop(). Polls the device once, and returns
  /// whether delayed values for the training may still arrive.
  virtual bool has_pending() { return false; }

  /// Returns the delayed values that have arrived since the last sample, or
  /// estimates for those that have not. To be called once, at the end.
  virtual std::vector<PastUtilisation> take_pending() { return {}; }

  /// Tries to read every value once.
  virtual ProbeAvailability availability() = 0;
};

/// Creates the probe of a device.
///
/// For "cpu", it reads this process: the resident memory, the utilisation in
/// percent of all cores that the process may use, the power of the whole
/// processor (RAPL, which most systems restrict to root), and the mean clock of
/// the cores.
///
/// For "cuda" or "cuda:N", it reads the whole device through NVML, including
/// other processes. The library is loaded at run time from libnvidia-ml.so.1 or
/// from the file named by the environment variable REPRISE_NVML. If it is
/// missing, no value is available and the reason says so. Asks CUDA for the bus
/// id of device N, which initializes the driver but allocates no device memory;
/// CUDA cannot be used in child processes forked afterwards.
///
/// Throws c10::Error for other devices.
std::unique_ptr<DeviceProbe> make_probe(const std::string& device);

}  // namespace reprise
