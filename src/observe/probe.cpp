// Tested by tests/observe/nvml_test.cpp.
#include "compat/cuda.h"
#include "observe/nvml.h"
#include "observe/probes.h"

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <string_view>

namespace reprise {
namespace {

/// Whether CUDA_VISIBLE_DEVICES lists UUIDs instead of indices, which MIG instances
/// require.
bool chosen_by_uuid() {
  const char* chosen = std::getenv("CUDA_VISIBLE_DEVICES");
  return chosen != nullptr &&
         std::string_view(chosen).find("-") != std::string_view::npos;
}

/// CUDA and NVML number devices differently; the bus id identifies a device in both.
detail::NvmlDevice nvml_device(const detail::Nvml& nvml, int index) {
  if (compat::cuda_built() && !chosen_by_uuid()) {
    try {
      const auto device = nvml.device_at(compat::cuda_pci_bus_id(index));
      if (device != nullptr) return device;
    } catch (const c10::Error&) {
      // CUDA failed to initialize; NVML can still read the device.
    }
  }
  const auto devices = nvml.cuda_devices();
  const auto at = static_cast<size_t>(index);
  return at < devices.size() ? devices[at] : nullptr;
}

}  // namespace

std::unique_ptr<DeviceProbe> make_probe(const std::string& device) {
  const c10::Device parsed(device);
  TORCH_CHECK(parsed.is_cpu() || parsed.is_cuda(),
              "[make_probe] expected cpu, cuda or cuda:N, got ", device);
  if (parsed.is_cpu()) return detail::make_process_probe();
  std::string reason;
  auto nvml = detail::Nvml::open(reason);
  if (nvml == nullptr) return detail::make_nvml_probe(nullptr, nullptr, reason);
  const auto handle =
      nvml_device(*nvml, parsed.has_index() ? parsed.index() : 0);
  if (handle == nullptr) reason = "NVML has no such device";
  return detail::make_nvml_probe(std::move(nvml), handle, reason);
}

}  // namespace reprise
