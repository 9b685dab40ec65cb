#include "base/limits.h"
#include "compat/cuda.h"
#include "observe/nvml.h"
#include "observe/probes.h"

#include <reprise/base/bytes.h>
#include <reprise/observe/devices.h>

#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <fstream>
#include <utility>

namespace reprise {
namespace {

using nlohmann::ordered_json;

std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    // ARM kernels report "Hardware" instead of "model name".
    if (line.rfind("model name", 0) == 0 || line.rfind("Hardware", 0) == 0) {
      const size_t colon = line.find(':');
      const size_t first = line.find_first_not_of(" \t", colon + 1);
      if (colon != std::string::npos && first != std::string::npos) {
        return line.substr(first);
      }
    }
  }
  return "CPU";
}

DeviceInfo processor() {
  const ProcessLimits limits = process_limits();
  DeviceInfo info;
  info.name = processor_name();
  info.kind = DeviceKind::kCpu;
  info.memory_bytes = limits.memory_bytes;
  info.cores = limits.cores;
  info.availability = detail::make_process_probe()->availability();
  return info;
}

DeviceInfo unknown_cuda_device(int index, const std::string& reason) {
  DeviceInfo info;
  info.name = fmt::format("CUDA device {}", index);
  info.kind = DeviceKind::kCuda;
  info.index = index;
  info.usable = compat::cuda_built();
  info.availability =
      detail::make_nvml_probe(nullptr, nullptr, reason)->availability();
  return info;
}

DeviceInfo cuda_device_from_nvml(const std::shared_ptr<detail::Nvml>& nvml,
                                 detail::NvmlDevice device, int index) {
  DeviceInfo info = unknown_cuda_device(index, "NVML cannot reach the device");
  if (const auto driver = nvml->driver(); !driver.empty()) info.driver = driver;
  if (device == nullptr) return info;
  if (const auto name = nvml->name(device); !name.empty()) info.name = name;
  info.cores = nvml->cores(device);
  detail::NvmlMemory memory;
  if (nvml->memory(device, memory) == detail::kNvmlSuccess) {
    info.memory_bytes = static_cast<int64_t>(memory.total);
  }
  info.availability = detail::make_nvml_probe(nvml, device, "")->availability();
  return info;
}

DeviceInfo cuda_device_from_libtorch(int index, const std::string& reason) {
  DeviceInfo info = unknown_cuda_device(index, reason);
  info.name = compat::cuda_device_name(index);
  info.memory_bytes = compat::cuda_device_memory(index).total;
  return info;
}

/// Sets `reason` if NVML is not available.
std::vector<DeviceInfo> cuda_devices(DeviceQuery query, std::string& reason) {
  std::vector<DeviceInfo> devices;
  if (const auto nvml = detail::Nvml::open(reason)) {
    for (const auto device : nvml->cuda_devices()) {
      devices.push_back(cuda_device_from_nvml(
          nvml, device, static_cast<int>(devices.size())));
    }
  } else if (query == DeviceQuery::kLibTorch) {
    for (int i = 0; i < compat::cuda_device_count(); ++i) {
      devices.push_back(cuda_device_from_libtorch(i, reason));
    }
  }
  return devices;
}

std::string flag_of(const DeviceInfo& info) {
  const std::string kind = to_text(info.kind);
  return info.kind == DeviceKind::kCpu ? kind
                                       : fmt::format("{}:{}", kind, info.index);
}

std::array<std::pair<const char*, const Availability*>, 4> availabilities(
    const DeviceInfo& info) {
  return {{{"memory", &info.availability.memory},
           {"utilisation", &info.availability.utilisation},
           {"power", &info.availability.power},
           {"clock", &info.availability.clock}}};
}

ordered_json device_object(const DeviceInfo& info) {
  ordered_json result;
  result["name"] = info.name;
  result["kind"] = to_text(info.kind);
  result["memory_bytes"] =
      info.memory_bytes > 0 ? ordered_json(info.memory_bytes) : nullptr;
  result["cores"] = info.cores ? ordered_json(*info.cores) : nullptr;
  result["driver"] = info.driver ? ordered_json(*info.driver) : nullptr;
  return result;
}

}  // namespace

DeviceKind device_kind(std::string_view device) {
  return from_text<DeviceKind>(device.substr(0, device.find(':')));
}

std::vector<DeviceInfo> list_devices(DeviceQuery query) {
  std::vector<DeviceInfo> devices{processor()};
  std::string reason;
  for (auto& info : cuda_devices(query, reason)) {
    devices.push_back(std::move(info));
  }
  return devices;
}

DeviceInfo device_info(const std::string& device, DeviceQuery query) {
  // Checked here because LibTorch's own error lists kinds that are not supported.
  TORCH_CHECK(
      device == "cpu" || device == "cuda" || device.starts_with("cuda:"),
      "[device_info] expected cpu, cuda or cuda:N, got '", device, "'");
  const c10::Device parsed(device);
  if (parsed.is_cpu()) return processor();
  const int index = parsed.has_index() ? parsed.index() : 0;
  std::string reason;
  auto devices = cuda_devices(query, reason);
  if (index < static_cast<int>(devices.size())) {
    return std::move(devices[static_cast<size_t>(index)]);
  }
  if (reason.empty()) {
    reason = fmt::format("NVML reports {} CUDA devices", devices.size());
  }
  return unknown_cuda_device(index, reason);
}

std::string to_json(const DeviceInfo& device) {
  return device_object(device).dump();
}

std::string to_json(const std::vector<DeviceInfo>& devices) {
  auto list = ordered_json::array();
  for (const DeviceInfo& info : devices) {
    ordered_json object = {{"device", flag_of(info)}};
    object.update(device_object(info));
    object["index"] = info.index;
    object["usable"] = info.usable;
    object["reasons"] = ordered_json::object();
    for (const auto& [name, value] : availabilities(info)) {
      object["visible"][name] = value->available;
      if (!value->available) object["reasons"][name] = value->reason;
    }
    list.push_back(std::move(object));
  }
  return ordered_json{{"devices", std::move(list)}}.dump(2);
}

std::string to_table(const std::vector<DeviceInfo>& devices) {
  size_t width = 4;
  for (const DeviceInfo& info : devices) {
    width = std::max(width, info.name.size());
  }
  std::string text =
      fmt::format("{:<8}  {:<{}}  {:>10}  {:>6}  {:<12}  {}\n", "device",
                  "name", width, "memory", "cores", "driver", "observable");
  for (const DeviceInfo& info : devices) {
    std::string available, reasons;
    for (const auto& [name, value] : availabilities(info)) {
      if (value->available) {
        available += (available.empty() ? "" : ", ") + std::string(name);
      } else {
        reasons += fmt::format("{:<8}  no {}: {}\n", "", name, value->reason);
      }
    }
    text += fmt::format(
        "{:<8}  {:<{}}  {:>10}  {:>6}  {:<12}  {}\n", flag_of(info), info.name,
        width, info.memory_bytes > 0 ? format_bytes(info.memory_bytes) : "-",
        info.cores ? std::to_string(*info.cores) : "-",
        info.driver.value_or("-"), available.empty() ? "nothing" : available);
    text += reasons;
    if (!info.usable) {
      text += fmt::format("{:<8}  not usable: this LibTorch has no CUDA\n", "");
    }
  }
  return text;
}

}  // namespace reprise
