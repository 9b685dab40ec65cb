#include "compat/cuda.h"
#include "fakes.h"
#include "support.h"

#include <reprise/observe/observer.h>
#include <reprise/observe/probe.h>

#include <chrono>
#include <functional>
#include <thread>

// If LibTorch has CUDA, cuda:0 is a real device whose bus id the fake NVML does not
// have. It is then found by its index, as without CUDA.
namespace reprise {
namespace {

using testing::Environment;
using testing::WithFakeNvml;

TEST(Nvml, ReadsAllValues) {
  const WithFakeNvml nvml;
  const auto probe = make_probe("cuda");
  EXPECT_EQ(probe->source(), "nvml");
  probe->restart();
  nvml->samples[0] = 10;
  nvml->samples[1] = 20;
  nvml->samples[2] = 60;
  nvml->sample_count = 3;
  const DeviceSample sample = probe->sample();
  EXPECT_EQ(sample.memory_bytes, 1000000000);
  EXPECT_EQ(sample.utilisation, 30);
  EXPECT_EQ(sample.power_w, 350.5);
  EXPECT_EQ(sample.clock_mhz, 1755);
}

TEST(Nvml, UtilisationUsesNewSamplesOnly) {
  const WithFakeNvml nvml;
  nvml->sample_count = 4;
  for (unsigned i = 0; i < 4; ++i) nvml->samples[i] = 100;
  const auto probe = make_probe("cuda");
  probe->restart();  // excludes these four samples
  EXPECT_FALSE(probe->sample().utilisation.has_value());
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  nvml->samples[4] = 20;
  nvml->samples[5] = 30;
  nvml->sample_count = 6;
  EXPECT_EQ(probe->sample().utilisation, 25);
  EXPECT_EQ(nvml->rate_calls, 0);
}

TEST(Nvml, CountsRepeatedSamplesOnce) {
  const WithFakeNvml nvml;
  nvml->repeats = true;
  nvml->samples[0] = 100;
  nvml->sample_count = 1;
  const auto probe = make_probe("cuda");
  probe->restart();
  EXPECT_FALSE(probe->sample().utilisation.has_value());
  nvml->samples[1] = 20;
  nvml->sample_count = 2;
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(probe->sample().utilisation, 20);
}

TEST(Nvml, GrowsTheSampleBuffer) {
  const WithFakeNvml nvml;
  const auto probe = make_probe("cuda");
  probe->restart();
  nvml->samples_error = 7;
  EXPECT_FALSE(probe->sample().utilisation.has_value());
  nvml->samples_error = 0;
  nvml->samples[0] = 45;
  nvml->sample_count = 1;
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(probe->sample().utilisation, 45);
}

TEST(Nvml, UsesRatesWithoutSamples) {
  const WithFakeNvml nvml;
  nvml->samples_error = 3;
  const auto probe = make_probe("cuda");
  probe->restart();
  // A rate read now would cover the time before.
  EXPECT_FALSE(probe->sample().utilisation.has_value());
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_FALSE(probe->sample().utilisation.has_value());
  std::this_thread::sleep_for(std::chrono::milliseconds(550));
  EXPECT_EQ(probe->sample().utilisation, 40);
  // Samples are not requested any more.
  const int calls = nvml->sample_calls;
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  probe->sample();
  EXPECT_EQ(nvml->sample_calls, calls);
}

TEST(Nvml, UsesRatesIfSamplesNeverArrive) {
  const WithFakeNvml nvml;
  const auto probe = make_probe("cuda");
  probe->restart();
  std::optional<double> utilisation;
  for (int i = 0; i < 40 && !utilisation; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    utilisation = probe->sample().utilisation;
  }
  EXPECT_EQ(utilisation, 40);
}

TEST(Nvml, ReadsInstantaneousPower) {
  const WithFakeNvml nvml;
  nvml->instant_error = 0;
  const auto probe = make_probe("cuda");
  EXPECT_EQ(probe->sample().power_w, 123);
  EXPECT_EQ(nvml->power_calls, 0);
  EXPECT_TRUE(probe->availability().power.available);
}

TEST(Nvml, SupportsOldDrivers) {
  const WithFakeNvml nvml(REPRISE_FAKE_NVML_OLD);
  const auto probe = make_probe("cuda:1");
  probe->restart();
  std::this_thread::sleep_for(std::chrono::milliseconds(1050));
  const DeviceSample sample = probe->sample();
  EXPECT_EQ(sample.memory_bytes, 2000000000);
  EXPECT_EQ(sample.utilisation, 40);
  EXPECT_EQ(sample.power_w, 350.5);
}

TEST(Nvml, FallsBackToTheOlderMemoryQuery) {
  const WithFakeNvml nvml;
  nvml->memory2_error = 3;
  EXPECT_EQ(make_probe("cuda")->sample().memory_bytes, 1000000000);
}

TEST(Nvml, GivesTheReasonForUnavailableValues) {
  const WithFakeNvml nvml;
  nvml->power_error = 4;
  nvml->memory_error = nvml->memory2_error = 999;
  const auto probe = make_probe("cuda");
  const ProbeAvailability availability = probe->availability();
  EXPECT_FALSE(availability.power.available);
  EXPECT_EQ(availability.power.reason, "Insufficient Permissions");
  EXPECT_FALSE(availability.memory.available);
  EXPECT_EQ(availability.memory.reason, "Unknown Error");
  EXPECT_TRUE(availability.utilisation.available);
  EXPECT_TRUE(availability.clock.available);

  probe->restart();
  const DeviceSample sample = probe->sample();
  EXPECT_FALSE(sample.power_w.has_value());
  EXPECT_FALSE(sample.memory_bytes.has_value());
  EXPECT_EQ(sample.clock_mhz, 1755);
}

TEST(Nvml, DoesNotRetryWithoutPermission) {
  const WithFakeNvml nvml;
  nvml->power_error = 4;
  const auto probe = make_probe("cuda");
  probe->sample();
  const int calls = nvml->power_calls;
  probe->restart();
  probe->sample();
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(nvml->power_calls, calls);
}

TEST(Nvml, RecoversFromATransientError) {
  const WithFakeNvml nvml;
  const auto probe = make_probe("cuda");
  nvml->memory_error = nvml->memory2_error = 999;
  EXPECT_FALSE(probe->sample().memory_bytes.has_value());
  nvml->memory_error = nvml->memory2_error = 0;
  EXPECT_EQ(probe->sample().memory_bytes, 1000000000);
}

TEST(Nvml, ReadsExpensiveValuesLessOften) {
  const WithFakeNvml nvml;
  nvml->spin_us = 2000;  // the next read is due after a second
  const auto probe = make_probe("cuda");
  for (int i = 0; i < 10; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_TRUE(probe->sample().memory_bytes.has_value());
  }
  EXPECT_EQ(nvml->power_calls, 1);
}

TEST(Nvml, RespectsCudaVisibleDevices) {
  const WithFakeNvml nvml;
  const auto asked = [&nvml](const char* visible, const char* device) {
    const Environment environment("CUDA_VISIBLE_DEVICES", visible);
    nvml->asked_device = -1;
    make_probe(device)->sample();
    return nvml->asked_device;
  };
  EXPECT_EQ(asked(nullptr, "cuda:1"), 1);
  EXPECT_EQ(asked("1", "cuda:0"), 1);
  EXPECT_EQ(asked("1,0", "cuda:1"), 0);
  EXPECT_EQ(asked(" 1 , 0", "cuda:0"), 1);
  EXPECT_EQ(asked("GPU-bbbb0000-2222", "cuda"), 1);
  EXPECT_EQ(asked("GPU-bb", "cuda"), 1);
  EXPECT_EQ(asked("GPU-", "cuda"), -1) << "ambiguous prefix";
  EXPECT_EQ(asked("GPU-cc", "cuda"), -1);
  EXPECT_EQ(asked("", "cuda:0"), -1);
  EXPECT_EQ(asked("1,-1,0", "cuda:1"), -1)
      << "stops at the first invalid entry";
  EXPECT_EQ(asked("1,1", "cuda:0"), -1) << "CUDA rejects duplicates";
  EXPECT_EQ(asked("1,7", "cuda:0"), 1);
  EXPECT_EQ(asked("nonsense", "cuda:0"), -1);
}

TEST(Nvml, ShutsDownOncePerInitialization) {
  const WithFakeNvml nvml;
  {
    const auto probe = make_probe("cuda");
    probe->sample();
    EXPECT_EQ(nvml->starts, 1);
    EXPECT_EQ(nvml->stops, 0);
  }
  EXPECT_EQ(nvml->stops, 1);
  nvml->init_error = 9;
  make_probe("cuda");
  EXPECT_EQ(nvml->stops, 1);
}

TEST(Nvml, HasNoValuesWithoutTheLibrary) {
  const Environment environment("REPRISE_NVML", "/nowhere/libnvidia-ml.so.1");
  const auto probe = make_probe("cuda");
  EXPECT_FALSE(probe->sample().memory_bytes.has_value());
  EXPECT_NE(
      probe->availability().memory.reason.find("/nowhere/libnvidia-ml.so.1"),
      std::string::npos);
  Observer observer("cuda");
  observer.begin();
  const Observation observed = observer.end();
  EXPECT_EQ(observed.source, "nvml");
  EXPECT_FALSE(observed.peak.memory_bytes.has_value());
  EXPECT_TRUE(observed.series.memory_bytes.empty());
}

TEST(Nvml, GivesTheReasonIfInitializationFails) {
  const WithFakeNvml nvml;
  nvml->init_error = 9;
  EXPECT_NE(
      make_probe("cuda")->availability().clock.reason.find("Driver Not Loaded"),
      std::string::npos);
}

TEST(Nvml, RejectsOtherDevices) {
  EXPECT_NE(testing::error_of([] { make_probe("mkldnn"); }).find("cuda:N"),
            std::string::npos);
}

TEST(Nvml, ObserverSubtractsTheBaseline) {
  const WithFakeNvml nvml;
  Observer observer("cuda:0");
  nvml->used[0] += 3000000000;
  observer.begin();
  nvml->samples[0] = 80;
  nvml->sample_count = 1;
  const Observation observed = observer.end();
  EXPECT_EQ(observed.baseline_bytes, 1000000000);
  EXPECT_EQ(observed.peak.memory_bytes, 3000000000);
  EXPECT_EQ(observed.average.memory_bytes, 3000000000);
  EXPECT_EQ(observed.peak.power_w, 350.5);
}

TEST(Nvml, ObservesARealDevice) {
  if (!testing::device().is_cuda()) GTEST_SKIP() << "no CUDA device";
  const Environment none("REPRISE_NVML", nullptr);
  const std::string device = testing::device().str();
  Observer observer(device);
  constexpr int64_t kBytes = int64_t{1} << 30;
  const auto block =
      torch::ones({kBytes / 4}, testing::on_device(torch::kFloat));
  compat::cuda_synchronize(testing::device().index());
  observer.begin();
  const auto a = torch::ones({4096, 4096}, testing::on_device(torch::kFloat));
  const auto until =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(1500);
  while (std::chrono::steady_clock::now() < until) {
    for (int i = 0; i < 10; ++i) a.mm(a);
    compat::cuda_synchronize(testing::device().index());
  }
  const Observation observed = observer.end();
  EXPECT_GE(observed.peak.memory_bytes.value_or(0), kBytes);
  EXPECT_GT(observed.average.utilisation.value_or(0), 50);
  EXPECT_GT(observed.average.power_w.value_or(0), 10);
  EXPECT_GT(observed.average.clock_mhz.value_or(0), 100);
  EXPECT_LT(observed.cost, 0.01);
}

}  // namespace
}  // namespace reprise
