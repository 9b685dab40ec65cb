#pragma once

#include <reprise/observe/probe.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

/// Interface to NVML, NVIDIA's management library, which is part of the driver and is
/// loaded at run time. Declares only the functions that are used, following
/// docs.nvidia.com/deploy/nvml-api.
namespace reprise::detail {

using NvmlReturn = int;
using NvmlDevice = void*;

constexpr NvmlReturn kNvmlSuccess = 0;
constexpr NvmlReturn kNvmlInvalidArgument = 2;
constexpr NvmlReturn kNvmlNotSupported = 3;
constexpr NvmlReturn kNvmlNoPermission = 4;
constexpr NvmlReturn kNvmlNotFound = 6;
constexpr NvmlReturn kNvmlInsufficientSize = 7;
constexpr NvmlReturn kNvmlFunctionNotFound = 13;
constexpr NvmlReturn kNvmlGpuIsLost = 15;

struct NvmlMemory {
  unsigned long long total = 0, free = 0, used = 0;
};
/// Unlike NvmlMemory, `used` excludes the memory that the driver reserves.
struct NvmlMemory2 {
  unsigned version = sizeof(NvmlMemory2) | (2U << 24U);
  unsigned long long total = 0, reserved = 0, free = 0, used = 0;
};
struct NvmlUtilization {
  unsigned gpu = 0, memory = 0;  // percent
};
union NvmlValue {
  double real;
  unsigned number;
  unsigned long long large;
};
struct NvmlSample {
  unsigned long long time_us = 0;
  NvmlValue value = {};
};
struct NvmlField {
  unsigned id = 0, scope = 0;
  long long time_us = 0, latency_us = 0;
  int type = 0;
  NvmlReturn code = kNvmlSuccess;
  NvmlValue value = {};
};
static_assert(sizeof(NvmlField) == 40, "must match NVIDIA's header");

/// The initialized library. Shut down with the last reference; never unloaded.
class Nvml {
 public:
  /// Returns null if the library is missing or fails to initialize, and sets `reason`.
  static std::shared_ptr<Nvml> open(std::string& reason);
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  std::string driver() const;
  std::string error(NvmlReturn code) const;

  /// The devices in CUDA's order, filtered by CUDA_VISIBLE_DEVICES. A device that does
  /// not respond is null.
  std::vector<NvmlDevice> cuda_devices() const;
  /// Returns null if there is no such device.
  NvmlDevice device_at(const std::string& pci_bus_id) const;

  std::string name(NvmlDevice device) const;  ///< empty if unknown
  std::optional<int> cores(NvmlDevice device) const;
  NvmlReturn memory(NvmlDevice device, NvmlMemory& memory) const;

  // Functions that older drivers lack; null if missing.
  NvmlReturn (*get_utilization)(NvmlDevice, NvmlUtilization*) = nullptr;
  NvmlReturn (*get_samples)(NvmlDevice, int, unsigned long long, int*,
                            unsigned*, NvmlSample*) = nullptr;
  NvmlReturn (*get_power)(NvmlDevice, unsigned*) = nullptr;
  NvmlReturn (*get_fields)(NvmlDevice, int, NvmlField*) = nullptr;
  NvmlReturn (*get_clock)(NvmlDevice, int, unsigned*) = nullptr;

 private:
  Nvml() = default;
  NvmlDevice device_by_uuid(const std::string& prefix) const;
  NvmlDevice device_by_index(unsigned index) const;

  bool started_ = false;
  NvmlReturn (*init_)() = nullptr;
  NvmlReturn (*shutdown_)() = nullptr;
  const char* (*error_string_)(NvmlReturn) = nullptr;
  NvmlReturn (*get_driver_)(char*, unsigned) = nullptr;
  NvmlReturn (*get_count_)(unsigned*) = nullptr;
  NvmlReturn (*get_by_index_)(unsigned, NvmlDevice*) = nullptr;
  NvmlReturn (*get_by_bus_)(const char*, NvmlDevice*) = nullptr;
  NvmlReturn (*get_by_uuid_)(const char*, NvmlDevice*) = nullptr;
  NvmlReturn (*get_uuid_)(NvmlDevice, char*, unsigned) = nullptr;
  NvmlReturn (*get_name_)(NvmlDevice, char*, unsigned) = nullptr;
  NvmlReturn (*get_cores_)(NvmlDevice, unsigned*) = nullptr;
  NvmlReturn (*get_memory_)(NvmlDevice, NvmlMemory*) = nullptr;
  NvmlReturn (*get_memory2_)(NvmlDevice, NvmlMemory2*) = nullptr;
};

/// If `nvml` or `device` is null, no value is available and `reason` says why.
std::unique_ptr<DeviceProbe> make_nvml_probe(std::shared_ptr<Nvml> nvml,
                                             NvmlDevice device,
                                             std::string reason);

}  // namespace reprise::detail
