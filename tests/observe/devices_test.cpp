#include "base/limits.h"
#include "compat/cuda.h"
#include "fakes.h"
#include "support.h"

#include <reprise/base/error.h>
#include <reprise/observe/devices.h>

#include <nlohmann/json.hpp>

namespace reprise {
namespace {

using testing::Environment;
using testing::WithFakeNvml;

TEST(Devices, KindIsWhatPrecedesTheIndex) {
  EXPECT_EQ(device_kind("cpu"), DeviceKind::kCpu);
  EXPECT_EQ(device_kind("cuda"), DeviceKind::kCuda);
  EXPECT_EQ(device_kind("cuda:3"), DeviceKind::kCuda);
  for (const char* text : {"", "auto", "cud", "mps:0"}) {
    EXPECT_THROW(device_kind(text), Error) << text;
  }
}

TEST(Devices, ListsTheCpuFirst) {
  const Environment none("REPRISE_NVML", "/nowhere.so");
  const auto devices = list_devices();
  ASSERT_EQ(devices.size(), 1U);
  const DeviceInfo& cpu = devices[0];
  EXPECT_EQ(cpu.kind, DeviceKind::kCpu);
  EXPECT_FALSE(cpu.name.empty());
  EXPECT_EQ(cpu.memory_bytes, process_limits().memory_bytes);
  EXPECT_EQ(cpu.cores, process_limits().cores);
  EXPECT_FALSE(cpu.driver.has_value());
  EXPECT_TRUE(cpu.usable);
  EXPECT_TRUE(cpu.availability.memory.available);
  EXPECT_TRUE(cpu.availability.utilisation.available);
}

TEST(Devices, ListsCudaDevicesThroughNvml) {
  const WithFakeNvml nvml;
  nvml->power_error = 4;
  const auto devices = list_devices();
  ASSERT_EQ(devices.size(), 3U);
  EXPECT_EQ(devices[1].name, "Fake A");
  EXPECT_EQ(devices[1].index, 0);
  EXPECT_EQ(devices[1].memory_bytes, 80000000000);
  const DeviceInfo& second = devices[2];
  EXPECT_EQ(second.name, "Fake B");
  EXPECT_EQ(second.kind, DeviceKind::kCuda);
  EXPECT_EQ(second.index, 1);
  EXPECT_EQ(second.memory_bytes, 79000000000);
  EXPECT_EQ(second.cores, 16896);
  EXPECT_EQ(second.driver, "580.1.2");
  EXPECT_EQ(second.usable, compat::cuda_built());
  EXPECT_TRUE(second.availability.memory.available);
  EXPECT_FALSE(second.availability.power.available);
  EXPECT_EQ(second.availability.power.reason, "Insufficient Permissions");
  EXPECT_EQ(nvml->starts, nvml->stops)
      << "NVML must be shut down before a fork";
}

TEST(Devices, RespectsCudaVisibleDevices) {
  const WithFakeNvml nvml;
  const Environment chosen("CUDA_VISIBLE_DEVICES", "1");
  EXPECT_EQ(list_devices().size(), 2U);
  EXPECT_EQ(device_info("cuda").name, "Fake B");
  EXPECT_EQ(device_info("cuda:0").index, 0);
  const DeviceInfo missing = device_info("cuda:1");
  EXPECT_EQ(missing.name, "CUDA device 1");
  EXPECT_FALSE(missing.availability.memory.available);
  EXPECT_EQ(missing.availability.memory.reason, "NVML reports 1 CUDA devices");
}

TEST(Devices, OldDriversReportNoCores) {
  const WithFakeNvml nvml(REPRISE_FAKE_NVML_OLD);
  nvml->name_error = 999;
  const DeviceInfo info = device_info("cuda:1");
  EXPECT_EQ(info.memory_bytes, 79000000000);
  EXPECT_FALSE(info.cores.has_value());
  EXPECT_EQ(info.name, "CUDA device 1");
}

TEST(Devices, GivesTheReasonIfNvmlIsMissing) {
  const Environment none("REPRISE_NVML", "/nowhere.so");
  const DeviceInfo info = device_info("cuda:0");
  EXPECT_EQ(info.kind, DeviceKind::kCuda);
  EXPECT_EQ(info.memory_bytes, 0);
  EXPECT_NE(info.availability.memory.reason.find("/nowhere.so"),
            std::string::npos);
  EXPECT_NE(testing::error_of([] { device_info("mkldnn"); }).find("cuda:N"),
            std::string::npos);
}

TEST(Devices, FallsBackToLibTorch) {
  if (!testing::device().is_cuda()) GTEST_SKIP() << "no CUDA device";
  const Environment none("REPRISE_NVML", "/nowhere.so");
  const DeviceInfo info =
      device_info(testing::device().str(), DeviceQuery::kLibTorch);
  EXPECT_EQ(info.name, compat::cuda_device_name(testing::device().index()));
  EXPECT_GT(info.memory_bytes, int64_t{1} << 30);
  EXPECT_FALSE(info.availability.memory.available);
}

TEST(Devices, WritesTheDocumentedJson) {
  const WithFakeNvml nvml;
  EXPECT_EQ(
      nlohmann::json::parse(to_json(device_info("cuda:1"))),
      nlohmann::json::parse(
          R"({"name": "Fake B", "kind": "cuda", "memory_bytes": 79000000000,
                    "cores": 16896, "driver": "580.1.2"})"));
  DeviceInfo unknown;
  unknown.name = "x";
  unknown.kind = DeviceKind::kCuda;
  EXPECT_EQ(nlohmann::json::parse(to_json(unknown)),
            nlohmann::json::parse(
                R"({"name": "x", "kind": "cuda", "memory_bytes": null,
                    "cores": null, "driver": null})"));
}

TEST(Devices, ListsSayWhichValuesAreAvailable) {
  const WithFakeNvml nvml;
  nvml->clock_error = 3;
  const auto devices = list_devices();
  const auto json = nlohmann::json::parse(to_json(devices))["devices"];
  ASSERT_EQ(json.size(), 3U);
  EXPECT_EQ(json[0]["device"], "cpu");
  EXPECT_EQ(json[2]["device"], "cuda:1");
  EXPECT_EQ(json[2]["index"], 1);
  EXPECT_EQ(json[2]["usable"], compat::cuda_built());
  EXPECT_EQ(json[2]["visible"],
            nlohmann::json::parse(R"({"memory": true, "utilisation": true,
                                      "power": true, "clock": false})"));
  EXPECT_EQ(json[2]["reasons"],
            nlohmann::json::parse(R"({"clock": "Not Supported"})"));

  const std::string table = to_table(devices);
  EXPECT_NE(table.find("cuda:1    Fake B"), std::string::npos) << table;
  EXPECT_NE(table.find("73.6 GiB"), std::string::npos) << table;
  EXPECT_NE(table.find("memory, utilisation, power\n"), std::string::npos);
  EXPECT_NE(table.find("no clock: Not Supported"), std::string::npos);
  EXPECT_EQ(table.find("this LibTorch has no CUDA") == std::string::npos,
            compat::cuda_built());
}

}  // namespace
}  // namespace reprise
