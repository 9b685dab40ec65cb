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
    // ARM has no "model name".
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
  info.kind = "cpu";
  info.memory_bytes = limits.memory_bytes;
  info.cores = limits.cores;
  info.visible = detail::make_process_probe()->visible();
  return info;
}

DeviceInfo unknown_cuda_device(int index, const std::string& reason) {
  DeviceInfo info;
  info.name = fmt::format("CUDA device {}", index);
  info.kind = "cuda";
  info.index = index;
  info.usable = compat::cuda_built();
  info.visible = detail::make_nvml_probe(nullptr, nullptr, reason)->visible();
  return info;
}

DeviceInfo seen_by_nvml(const std::shared_ptr<detail::Nvml>& nvml,
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
  info.visible = detail::make_nvml_probe(nvml, device, "")->visible();
  return info;
}

DeviceInfo seen_by_libtorch(int index, const std::string& reason) {
  DeviceInfo info = unknown_cuda_device(index, reason);
  info.name = compat::cuda_device_name(index);
  info.memory_bytes = compat::cuda_device_memory(index).total;
  return info;
}

/// `reason`: why NVML shows none, where it does not work.
std::vector<DeviceInfo> cuda_devices(Ask ask, std::string& reason) {
  std::vector<DeviceInfo> devices;
  if (const auto nvml = detail::Nvml::open(reason)) {
    for (const auto device : nvml->cuda_devices()) {
      devices.push_back(
          seen_by_nvml(nvml, device, static_cast<int>(devices.size())));
    }
  } else if (ask == Ask::kLibTorch) {
    for (int i = 0; i < compat::cuda_device_count(); ++i) {
      devices.push_back(seen_by_libtorch(i, reason));
    }
  }
  return devices;
}

std::string flag_of(const DeviceInfo& info) {
  return info.kind == "cpu" ? "cpu" : fmt::format("cuda:{}", info.index);
}

std::array<std::pair<const char*, const Availability*>, 4> sights(
    const DeviceInfo& info) {
  return {{{"memory", &info.visible.memory},
           {"utilisation", &info.visible.utilisation},
           {"power", &info.visible.power},
           {"clock", &info.visible.clock}}};
}

ordered_json device_object(const DeviceInfo& info) {
  ordered_json result;
  result["name"] = info.name;
  result["kind"] = info.kind;
  result["memory_bytes"] =
      info.memory_bytes > 0 ? ordered_json(info.memory_bytes) : nullptr;
  result["cores"] = info.cores ? ordered_json(*info.cores) : nullptr;
  result["driver"] = info.driver ? ordered_json(*info.driver) : nullptr;
  return result;
}

}  // namespace

std::vector<DeviceInfo> list_devices(Ask ask) {
  std::vector<DeviceInfo> devices{processor()};
  std::string reason;
  for (auto& info : cuda_devices(ask, reason)) {
    devices.push_back(std::move(info));
  }
  return devices;
}

DeviceInfo device_info(const std::string& device, Ask ask) {
  // LibTorch knows more kinds, and lists them all if it is given none of them.
  TORCH_CHECK(
      device == "cpu" || device == "cuda" || device.starts_with("cuda:"),
      "[device_info] expected cpu, cuda or cuda:N, got '", device, "'");
  const c10::Device parsed(device);
  if (parsed.is_cpu()) return processor();
  const int index = parsed.has_index() ? parsed.index() : 0;
  std::string reason;
  auto devices = cuda_devices(ask, reason);
  if (index < static_cast<int>(devices.size())) {
    return std::move(devices[static_cast<size_t>(index)]);
  }
  if (reason.empty()) {
    reason = fmt::format("NVML shows {} CUDA devices", devices.size());
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
    for (const auto& [name, sight] : sights(info)) {
      object["visible"][name] = sight->seen;
      if (!sight->seen) object["reasons"][name] = sight->reason;
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
                  "name", width, "memory", "cores", "driver", "observer sees");
  for (const DeviceInfo& info : devices) {
    std::string seen, unseen;
    for (const auto& [name, sight] : sights(info)) {
      if (sight->seen) {
        seen += (seen.empty() ? "" : ", ") + std::string(name);
      } else {
        unseen += fmt::format("{:<8}  no {}: {}\n", "", name, sight->reason);
      }
    }
    text += fmt::format(
        "{:<8}  {:<{}}  {:>10}  {:>6}  {:<12}  {}\n", flag_of(info), info.name,
        width, info.memory_bytes > 0 ? format_bytes(info.memory_bytes) : "-",
        info.cores ? std::to_string(*info.cores) : "-",
        info.driver.value_or("-"), seen.empty() ? "nothing" : seen);
    text += unseen;
    if (!info.usable) {
      text += fmt::format("{:<8}  not usable: this LibTorch has no CUDA\n", "");
    }
  }
  return text;
}

}  // namespace reprise
