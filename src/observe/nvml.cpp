#include "observe/nvml.h"

#include <algorithm>
#include <cstdlib>
#include <dlfcn.h>
#include <sstream>

namespace reprise::detail {
namespace {

template <class Function>
void look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
}

/// Looks up the newer name of a function and falls back to the older one.
template <class Function>
void look_up(void* library, const char* name, const char* older,
             Function& function) {
  look_up(library, name, function);
  if (function == nullptr) look_up(library, older, function);
}

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t");
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

}  // namespace

std::shared_ptr<Nvml> Nvml::open(std::string& reason) {
  const char* path = std::getenv("REPRISE_NVML");
  if (path == nullptr || *path == '\0') path = "libnvidia-ml.so.1";
  // Never closed: the driver's libraries may not support being unloaded.
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    reason = std::string("no NVML: ") + dlerror();
    return nullptr;
  }
  const std::shared_ptr<Nvml> nvml(new Nvml);
  look_up(library, "nvmlInit_v2", "nvmlInit", nvml->init_);
  look_up(library, "nvmlShutdown", nvml->shutdown_);
  look_up(library, "nvmlErrorString", nvml->error_string_);
  look_up(library, "nvmlSystemGetDriverVersion", nvml->get_driver_);
  look_up(library, "nvmlDeviceGetCount_v2", "nvmlDeviceGetCount",
          nvml->get_count_);
  look_up(library, "nvmlDeviceGetHandleByIndex_v2",
          "nvmlDeviceGetHandleByIndex", nvml->get_by_index_);
  look_up(library, "nvmlDeviceGetHandleByPciBusId_v2",
          "nvmlDeviceGetHandleByPciBusId", nvml->get_by_bus_);
  look_up(library, "nvmlDeviceGetHandleByUUID", nvml->get_by_uuid_);
  look_up(library, "nvmlDeviceGetUUID", nvml->get_uuid_);
  look_up(library, "nvmlDeviceGetName", nvml->get_name_);
  look_up(library, "nvmlDeviceGetNumGpuCores", nvml->get_cores_);
  look_up(library, "nvmlDeviceGetMemoryInfo", nvml->get_memory_);
  look_up(library, "nvmlDeviceGetMemoryInfo_v2", nvml->get_memory2_);
  look_up(library, "nvmlDeviceGetUtilizationRates", nvml->get_utilization);
  look_up(library, "nvmlDeviceGetSamples", nvml->get_samples);
  look_up(library, "nvmlDeviceGetPowerUsage", nvml->get_power);
  look_up(library, "nvmlDeviceGetFieldValues", nvml->get_fields);
  look_up(library, "nvmlDeviceGetClockInfo", nvml->get_clock);
  if (nvml->init_ == nullptr) {
    reason = std::string("no NVML: ") + path + " has no nvmlInit";
    return nullptr;
  }
  const NvmlReturn code = nvml->init_();
  if (code != kNvmlSuccess) {
    reason = "NVML failed to initialize: " + nvml->error(code);
    return nullptr;
  }
  nvml->started_ = true;
  return nvml;
}

Nvml::~Nvml() {
  if (started_ && shutdown_ != nullptr) shutdown_();
}

std::string Nvml::error(NvmlReturn code) const {
  const char* text = error_string_ == nullptr ? nullptr : error_string_(code);
  return text == nullptr ? "NVML error " + std::to_string(code)
                         : std::string(text);
}

std::string Nvml::driver() const {
  char text[96] = {};
  if (get_driver_ == nullptr || get_driver_(text, sizeof(text)) != kNvmlSuccess)
    return "";
  return text;
}

NvmlDevice Nvml::device_by_index(unsigned index) const {
  NvmlDevice device = nullptr;
  if (get_by_index_ == nullptr ||
      get_by_index_(index, &device) != kNvmlSuccess) {
    return nullptr;
  }
  return device;
}

NvmlDevice Nvml::device_at(const std::string& pci_bus_id) const {
  NvmlDevice device = nullptr;
  if (get_by_bus_ == nullptr ||
      get_by_bus_(pci_bus_id.c_str(), &device) != kNvmlSuccess) {
    return nullptr;
  }
  return device;
}

/// Like CUDA, accepts any prefix of a UUID that is unique.
NvmlDevice Nvml::device_by_uuid(const std::string& prefix) const {
  NvmlDevice found = nullptr;
  if (get_by_uuid_ != nullptr &&
      get_by_uuid_(prefix.c_str(), &found) == kNvmlSuccess) {
    return found;  // a complete UUID, which MIG instances require
  }
  found = nullptr;
  unsigned count = 0;
  if (get_uuid_ == nullptr || get_count_ == nullptr ||
      get_count_(&count) != kNvmlSuccess) {
    return nullptr;
  }
  for (unsigned i = 0; i < count; ++i) {
    const NvmlDevice device = device_by_index(i);
    char uuid[128] = {};
    if (device == nullptr ||
        get_uuid_(device, uuid, sizeof(uuid)) != kNvmlSuccess ||
        std::string(uuid).compare(0, prefix.size(), prefix) != 0) {
      continue;
    }
    if (found != nullptr) return nullptr;
    found = device;
  }
  return found;
}

std::vector<NvmlDevice> Nvml::cuda_devices() const {
  std::vector<NvmlDevice> devices;
  unsigned count = 0;
  if (get_count_ == nullptr || get_count_(&count) != kNvmlSuccess) {
    return devices;
  }
  const char* chosen = std::getenv("CUDA_VISIBLE_DEVICES");
  if (chosen == nullptr) {
    for (unsigned i = 0; i < count; ++i) devices.push_back(device_by_index(i));
    return devices;
  }
  // Like CUDA, stops at the first invalid entry, and returns no device if one is listed
  // twice.
  std::istringstream list(chosen);
  for (std::string word; std::getline(list, word, ',');) {
    word = trimmed(word);
    NvmlDevice device = nullptr;
    if (word.rfind("GPU-", 0) == 0 || word.rfind("MIG-", 0) == 0) {
      device = device_by_uuid(word);
      if (device == nullptr) break;
    } else {
      char* end = nullptr;
      const long index = std::strtol(word.c_str(), &end, 10);
      if (word.empty() || *end != '\0' || index < 0 ||
          index >= static_cast<long>(count)) {
        break;
      }
      device = device_by_index(static_cast<unsigned>(index));
    }
    if (device != nullptr &&
        std::find(devices.begin(), devices.end(), device) != devices.end()) {
      return {};
    }
    devices.push_back(device);
  }
  return devices;
}

std::string Nvml::name(NvmlDevice device) const {
  char text[128] = {};
  if (get_name_ == nullptr ||
      get_name_(device, text, sizeof(text)) != kNvmlSuccess) {
    return "";
  }
  return text;
}

std::optional<int> Nvml::cores(NvmlDevice device) const {
  unsigned cores = 0;
  if (get_cores_ == nullptr || get_cores_(device, &cores) != kNvmlSuccess) {
    return std::nullopt;
  }
  return static_cast<int>(cores);
}

NvmlReturn Nvml::memory(NvmlDevice device, NvmlMemory& memory) const {
  NvmlReturn code = kNvmlFunctionNotFound;
  if (get_memory2_ != nullptr) {
    NvmlMemory2 newer;
    code = get_memory2_(device, &newer);
    if (code == kNvmlSuccess) {
      memory = {newer.total, newer.free, newer.used};
      return code;
    }
  }
  if (get_memory_ != nullptr) code = get_memory_(device, &memory);
  return code;
}

}  // namespace reprise::detail
