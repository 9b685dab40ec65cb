#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

/// What can be read of a device from outside, beside a training.
namespace reprise {

/// One look at a device. What cannot be seen, or has nothing new since the last
/// look, is empty.
struct DeviceSample {
  std::optional<int64_t> memory_bytes;  ///< in use
  std::optional<double> utilisation;    ///< percent, since the look before
  std::optional<double> power_w;
  std::optional<double> clock_mhz;
};

/// Whether something can be seen, and why not.
struct Sight {
  bool seen = false;
  std::string reason;  ///< empty where it is seen
};

struct Visible {
  Sight memory, utilisation, power, clock;
};

/// Reads one device. From any thread, but from one at a time.
class DeviceProbe {
 public:
  virtual ~DeviceProbe() = default;

  /// "nvml" or "process".
  virtual std::string source() const = 0;

  /// Does not throw for what cannot be read.
  virtual DeviceSample sample() = 0;

  /// Utilisation counts from here on.
  virtual void restart() {}

  /// Looks at everything once.
  virtual Visible visible() = 0;
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
