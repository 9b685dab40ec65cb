#include "compat/cpu_isa.h"

#include "environment.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace reprise::compat {
namespace {

std::string text_of(AmxSupport support) {
  switch (support) {
    case AmxSupport::kAbsent:
      return "absent";
    case AmxSupport::kUsable:
      return "usable";
    case AmxSupport::kForbidden:
      return "forbidden";
  }
  return "";
}

/// The answer is found when a process starts, so each case is one: this program, which
/// runs `Reports` alone. Returns what it printed.
std::string report_of(const char* amx, const char* onednn, const char* dnnl,
                      const char* log = nullptr) {
  const testing::Environment child("REPRISE_TEST_CPU_ISA", "1");
  const testing::Environment simulate("REPRISE_SIMULATE_AMX", amx);
  const testing::Environment value("ONEDNN_MAX_CPU_ISA", onednn);
  const testing::Environment older("DNNL_MAX_CPU_ISA", dnnl);
  const testing::Environment level("REPRISE_LOG", log);
  // Not through popen's own /proc/self/exe, which is a shell.
  const std::string command =
      std::filesystem::read_symlink("/proc/self/exe").string() +
      " --gtest_filter=CpuIsa.Reports 2>&1";
  FILE* output = popen(command.c_str(), "r");
  std::string text;
  for (int c = 0; output != nullptr && (c = std::fgetc(output)) != EOF;) {
    text += static_cast<char>(c);
  }
  EXPECT_EQ(pclose(output), 0) << text;
  return text;
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(CpuIsa, Reports) {
  if (std::getenv("REPRISE_TEST_CPU_ISA") == nullptr) return;
  const char* limit = std::getenv("ONEDNN_MAX_CPU_ISA");
  std::printf("amx %s, limit '%s', variable '%s'\n",
              text_of(amx_support()).c_str(), onednn_isa_limit().c_str(),
              limit == nullptr ? "" : limit);
  // The products that end a process on a machine that forbids AMX.
  const auto a = torch::ones({64, 64}, torch::kBFloat16);
  EXPECT_EQ(torch::mm(a, a).sum().item<float>(), 64.0F * 64 * 64);
}

TEST(CpuIsa, ForbiddenAmxLimitsOneDnn) {
  EXPECT_TRUE(has(report_of("forbidden", nullptr, nullptr),
                  "amx forbidden, limit 'AVX512_CORE_BF16', variable "
                  "'AVX512_CORE_BF16'"));
}

TEST(CpuIsa, UsableAmxIsLeftAlone) {
  EXPECT_TRUE(has(report_of("usable", nullptr, nullptr),
                  "amx usable, limit '', variable ''"));
}

TEST(CpuIsa, TheUsersValueStays) {
  // Not AVX2: with it, oneDNN refuses the bf16 products that LibTorch asks it for on
  // processors with AVX-512.
  EXPECT_TRUE(has(report_of("forbidden", "AVX512_CORE", nullptr),
                  "amx forbidden, limit '', variable 'AVX512_CORE'"));
  EXPECT_TRUE(has(report_of("forbidden", nullptr, "AVX512_CORE"),
                  "amx forbidden, limit '', variable ''"));
}

TEST(CpuIsa, SaysSoOnceAtDebugLevelOnly) {
  const std::string told = report_of("forbidden", nullptr, nullptr, "debug");
  const size_t first = told.find("advertises AMX");
  EXPECT_NE(first, std::string::npos) << told;
  EXPECT_EQ(told.find("advertises AMX", first + 1), std::string::npos);
  EXPECT_FALSE(has(report_of("forbidden", nullptr, nullptr), "advertises"));
  EXPECT_FALSE(
      has(report_of("usable", nullptr, nullptr, "debug"), "advertises"));
}

TEST(CpuIsa, ThisMachinesAnswerIsSound) {
  if (std::getenv("REPRISE_SIMULATE_AMX") != nullptr) return;
  // Whatever it is: a process that follows it gets through a bf16 product.
  EXPECT_TRUE(has(report_of(nullptr, nullptr, nullptr), "amx "));
}

}  // namespace
}  // namespace reprise::compat
