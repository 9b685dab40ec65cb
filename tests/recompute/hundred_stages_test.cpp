#include "support.h"

#include <reprise/memory/meter.h>
#include <reprise/recompute/execution.h>
#include <reprise/recompute/simulate.h>
#include <reprise/recompute/stage_costs.h>
#include <reprise/recompute/strategy.h>

#include <algorithm>
#include <cmath>

namespace reprise {
namespace {

using testing::device;
using testing::on_device;
using testing::Recorder;

struct Measured {
  int64_t kept_peak;
  int64_t kept_after_forward;
  int64_t allocator_peak;  // rise, parameters' gradients not included
  int most_runs;
  Simulation simulated;
};

class HundredStages : public ::testing::Test {
 protected:
  // Activations are much larger than weights, as in models that benefit from
  // recomputation.
  static constexpr int64_t kWidth = 16;
  static constexpr int64_t kRows = 8192;
  Chain chain = testing::equal_stages(100, kWidth);
  torch::Tensor x = torch::randn({kRows, kWidth}, on_device());
  ChainCosts chain_costs = measure_stage_costs(chain, {x});

  Measured measure(const std::string& strategy) {
    const auto schedule = make_schedule(strategy, 100);
    const KeptMeter kept(chain.parameters());
    Recorder recorder;
    Execution execution(chain, schedule,
                        {.meter = &kept, .observer = &recorder});
    // Gradients of parameters exist before, as in all micro-batches of a window
    // but the first.
    for (auto p : chain.parameters()) p.mutable_grad() = torch::zeros_like(p);
    const MemoryMeter meter(device());
    const auto y = execution.forward({x});
    const int64_t after_forward = kept.live_bytes();
    // Moved, because an initializer list would hold it until the end.
    Tensors gradients(1);
    gradients[0] = torch::ones_like(y[0]);
    execution.backward(std::move(gradients));
    Measured measured{kept.peak_bytes(), after_forward,
                      meter.peak_increase_bytes(), 0,
                      simulate(schedule, chain_costs)};
    for (int i = 0; i < 100; ++i) {
      EXPECT_EQ(recorder.runs(i), measured.simulated.runs[size_t(i)]);
      measured.most_runs = std::max(measured.most_runs, recorder.runs(i));
    }
    return measured;
  }

  static void expect_within(int64_t predicted, int64_t measured,
                            const std::string& what, double tolerance = 0.02) {
    EXPECT_LE(std::abs(double(predicted) / double(measured) - 1), tolerance)
        << what << ": predicted " << predicted << ", measured " << measured;
  }
};

TEST_F(HundredStages, SqrtKeepsAFifth) {
  const auto none = measure("none");
  const auto sqrt = measure("sqrt");
  EXPECT_EQ(none.most_runs, 1);
  EXPECT_LE(sqrt.most_runs, 2);
  EXPECT_LE(double(sqrt.kept_peak), 0.22 * double(none.kept_peak));
  EXPECT_LE(double(sqrt.allocator_peak), 0.25 * double(none.allocator_peak));
  RecordProperty(
      "sqrt_kept_percent",
      std::to_string(100.0 * double(sqrt.kept_peak) / double(none.kept_peak)));
}

TEST_F(HundredStages, RevolveWithSixSlotsKeepsLessThanATenth) {
  const auto none = measure("none");
  const auto revolve = measure("revolve:6");
  EXPECT_LT(double(revolve.kept_peak), 0.10 * double(none.kept_peak));
  EXPECT_LT(double(revolve.allocator_peak), 0.13 * double(none.allocator_peak));
  RecordProperty("revolve_kept_percent",
                 std::to_string(100.0 * double(revolve.kept_peak) /
                                double(none.kept_peak)));
}

TEST_F(HundredStages, SimulatorAndMeasurementAgree) {
  for (const char* strategy :
       {"none", "all", "sqrt", "every:7", "checkpoints:0", "checkpoints:9",
        "revolve:1", "revolve:6", "revolve:20"}) {
    const auto measured = measure(strategy);
    expect_within(measured.simulated.kept_peak_bytes, measured.kept_peak,
                  std::string(strategy) + ", kept");
    expect_within(measured.simulated.kept_after_forward_bytes,
                  measured.kept_after_forward,
                  std::string(strategy) + ", kept after the forward");
    // The CUDA allocator rounds blocks up, and libraries allocate workspaces.
    expect_within(measured.simulated.peak_bytes, measured.allocator_peak,
                  std::string(strategy) + ", allocator",
                  device().is_cpu() ? 0.02 : 0.05);
  }
}

}  // namespace
}  // namespace reprise
