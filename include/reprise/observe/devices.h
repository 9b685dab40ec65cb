#pragma once

#include <reprise/observe/probe.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace reprise {

/// A device and what the observer can see of it.
struct DeviceInfo {
  std::string name;          ///< such as "NVIDIA H200"
  std::string kind;          ///< "cpu" or "cuda"
  int index = 0;             ///< the N of cuda:N
  int64_t memory_bytes = 0;  ///< in all, what others use included; 0: unknown
  std::optional<int> cores;  ///< that may be used; on CUDA CUDA cores
  std::optional<std::string> driver;  ///< CUDA
  bool usable = true;                 ///< this LibTorch can train on it
  ProbeAvailability visible;
};

/// Whether CUDA may be started in this process to learn of devices. A process
/// that forks must not have done so.
enum class Ask {
  kNvml,     ///< NVML alone: CUDA stays as it is, and so do children
  kLibTorch  ///< where there is no NVML, LibTorch
};

/// The CPU, then the CUDA devices in the order of CUDA's numbers. By NVML alone
/// the numbers are those of the bus, and CUDA_VISIBLE_DEVICES is followed; CUDA
/// numbers different models by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID.
std::vector<DeviceInfo> list_devices(Ask ask = Ask::kNvml);

/// Of "cpu", "cuda" or "cuda:N". A CUDA device that nobody knows of has a name
/// made up, no memory, and the reason in `visible`. Throws c10::Error on others.
DeviceInfo device_info(const std::string& device, Ask ask = Ask::kNvml);

/// {name, kind, memory_bytes, cores, driver}, as in docs/results.md.
std::string to_json(const DeviceInfo& device);

/// {"devices": […]}, each with device, index, usable, visible and reasons too.
std::string to_json(const std::vector<DeviceInfo>& devices);

/// For people.
std::string to_table(const std::vector<DeviceInfo>& devices);

}  // namespace reprise
