#pragma once

#include <reprise/base/enum_text.h>
#include <reprise/observe/probe.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace reprise {

enum class DeviceKind { kCpu, kCuda };

template <>
struct EnumText<DeviceKind> {
  static constexpr std::array<std::string_view, 2> names{"cpu", "cuda"};
};

/// Kind of "cpu", "cuda" or "cuda:N". Throws reprise::Error for other devices.
DeviceKind device_kind(std::string_view device);

/// A device and the values that the observer can read from it.
struct DeviceInfo {
  std::string name;  ///< such as "NVIDIA H200"
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;  ///< N of cuda:N
  /// Total memory, including memory used by other processes; 0: unknown.
  int64_t memory_bytes = 0;
  std::optional<int> cores;           ///< usable CPU cores, or CUDA cores
  std::optional<std::string> driver;  ///< driver version (CUDA)
  bool usable = true;                 ///< whether this LibTorch supports it
  ProbeAvailability availability;
};

/// How CUDA devices are found. A process that has initialized CUDA cannot use it
/// in forked children.
enum class DeviceQuery {
  kNvml,     ///< NVML only; does not initialize CUDA
  kLibTorch  ///< LibTorch if NVML is not available; initializes CUDA
};

/// Lists the CPU and then the CUDA devices in CUDA's order. NVML orders devices
/// by bus id, and CUDA_VISIBLE_DEVICES is respected. CUDA itself orders different
/// models by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID.
std::vector<DeviceInfo> list_devices(DeviceQuery query = DeviceQuery::kNvml);

/// Describes "cpu", "cuda" or "cuda:N". An unknown CUDA device gets a generic
/// name, no memory size, and the reason in `availability`. Throws c10::Error for
/// other devices.
DeviceInfo device_info(const std::string& device,
                       DeviceQuery query = DeviceQuery::kNvml);

/// JSON object {name, kind, memory_bytes, cores, driver} as documented in
/// docs/results.md.
std::string to_json(const DeviceInfo& device);

/// JSON object {"devices": [...]}; each device also has the keys device, index,
/// usable, visible and reasons.
std::string to_json(const std::vector<DeviceInfo>& devices);

/// Human-readable table.
std::string to_table(const std::vector<DeviceInfo>& devices);

}  // namespace reprise
