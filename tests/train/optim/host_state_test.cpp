// Optimizers whose state is in host memory. The truth are the same optimizers with their state
// on the device.
#include "memory/failure.h"
#include "memory/host_tensors.h"
#include "support.h"
#include "train/optim/optimizer_values.h"
#include "train/optim/partial_optimizer.h"
#include "train/optim/random_gradients.h"
#include "train/optim/state_ring.h"

#include <reprise/memory/meter.h>
#include <reprise/train/optimizer.h>

#include <optional>

namespace reprise {
namespace {

using detail::HostTensors;
using detail::HostTensorsOnCpu;
using detail::PartialOptimizer;
using testing::device;
using testing::on_device;
using testing::same;
using testing::set_random_gradients;

/// Host memory of the device under test.
struct HostMemory {
  explicit HostMemory(int64_t chunk, int64_t limit = int64_t{1} << 30) {
    if (device().is_cuda()) {
      host = detail::make_pinned_tensors(
          device().index(), std::make_shared<detail::HostQuota>(limit));
    } else {
      on_cpu.emplace(limit, chunk);
      host = HostTensorsOnCpu::make();
    }
  }
  std::optional<HostTensorsOnCpu> on_cpu;
  std::shared_ptr<HostTensors> host;
};

/// Small, large, dense but not contiguous, of another type, and without state.
NamedTensors mixed_parameters() {
  torch::manual_seed(3);
  NamedTensors list;
  const auto add = [&](const char* name, torch::Tensor values) {
    list.emplace_back(name, values.detach().clone(at::MemoryFormat::Preserve));
    list.back().second.requires_grad_();
  };
  add("bias", torch::randn({7}, on_device()));
  add("matrix", torch::randn({130, 71}, on_device()));
  add("scalar", torch::randn({}, on_device()));
  add("conv", torch::randn({8, 6, 3, 3}, on_device())
                  .contiguous(at::MemoryFormat::ChannelsLast));
  add("turned", torch::randn({40, 50}, on_device()).t());
  add("double", torch::randn({33}, on_device().dtype(torch::kDouble)));
  add("large", torch::randn({300, 211}, on_device()));
  add("empty", torch::randn({0, 4}, on_device()));
  add("frozen", torch::randn({5}, on_device()));
  list.back().second.requires_grad_(false);
  return list;
}

std::vector<OptimizerOptions> all_optimizers() {
  std::vector<OptimizerOptions> list;
  for (const std::string& name : optimizer_names()) {
    OptimizerOptions options;
    options.name = name;
    options.weight_decay = 0.1;
    list.push_back(options);
  }
  OptimizerOptions momentum;
  momentum.name = "sgd";
  momentum.momentum = 0.9;
  list.push_back(momentum);
  momentum.nesterov = true;
  list.push_back(momentum);
  OptimizerOptions groups;
  groups.groups.push_back(
      {.contains = [](const std::string&,
                      const torch::Tensor& p) { return p.dim() < 2; },
       .lr_factor = 3,
       .weight_decay = 0});
  list.push_back(groups);
  return list;
}

PartialOptimizer& partial_of(Optimizer& optimizer) {
  return dynamic_cast<PartialOptimizer&>(optimizer);
}

void expect_equal(const NamedTensors& a, const NamedTensors& b,
                  const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].first, b[i].first) << what;
    EXPECT_TRUE(same(a[i].second.cpu(), b[i].second.cpu()))
        << what << " " << a[i].first;
  }
}

/// Some parameters have no gradient in some updates.
void set_gradients(NamedTensors& parameters, int update) {
  set_random_gradients(parameters, static_cast<uint64_t>(update));
  parameters.back().second.mutable_grad().reset();
  if (update % 3 == 1) parameters[1].second.mutable_grad().reset();
  // A gradient with other strides than its parameter.
  if (update % 3 == 2) {
    torch::Tensor& p = parameters[6].second;
    p.mutable_grad() = p.grad().t().contiguous().t();
  }
}

TEST(HostState, DoesNotChangeResults) {
  for (const auto& [chunk, share] : std::vector<std::pair<int64_t, double>>{
           {5000, 1}, {1 << 20, 1}, {5000, 0.5}}) {
    const HostMemory memory(chunk);
    for (const OptimizerOptions& options : all_optimizers()) {
      const std::string what =
          options.name + " in chunks of " + std::to_string(chunk);
      NamedTensors expected = mixed_parameters();
      NamedTensors got = mixed_parameters();
      const auto resident = make_optimizer(options, expected);
      const auto streamed = make_optimizer(options, got);
      ASSERT_TRUE(partial_of(*streamed).move_state(memory.host, share));
      for (int i = 0; i < 4; ++i) {
        set_gradients(expected, i);
        set_gradients(got, i);
        resident->step(0.01);
        streamed->step(0.01);
        expect_equal(got, expected, what);
        expect_equal(streamed->state(), resident->state(), what);
      }
      // Parts of an update, as in the backward.
      set_gradients(expected, 7);
      set_gradients(got, 7);
      resident->step(0.02);
      partial_of(*streamed).begin_update(0.02);
      std::vector<torch::Tensor> all;
      for (const auto& item : got) {
        partial_of(*streamed).update_some({item.second}, false);
        if (item.second.grad().defined()) all.push_back(item.second);
      }
      partial_of(*streamed).end_update(all);
      expect_equal(got, expected, what);
    }
  }
}

/// By whole parameters.
TEST(HostState, AShareStaysOnTheDevice) {
  const HostMemory memory(5000);
  NamedTensors parameters;
  for (int i = 0; i < 20; ++i) {
    parameters.emplace_back(
        std::to_string(i),
        torch::randn({1000 + 10 * i}, on_device()).requires_grad_());
  }
  const auto bytes_of = [&](double share) {
    const auto optimizer = make_optimizer({.name = "adamw"}, parameters);
    EXPECT_TRUE(partial_of(*optimizer).move_state(memory.host, share));
    return static_cast<double>(partial_of(*optimizer).host_state_bytes());
  };
  const double all = bytes_of(1);
  for (const double share : {0.25, 0.5, 0.75}) {
    EXPECT_NEAR(bytes_of(share) / all, share, 0.04);
  }
  EXPECT_EQ(bytes_of(0), 0);
}

TEST(HostState, MovesWithItsValues) {
  const HostMemory memory(5000);
  for (const OptimizerOptions& options : all_optimizers()) {
    NamedTensors expected = mixed_parameters();
    NamedTensors got = mixed_parameters();
    const auto resident = make_optimizer(options, expected);
    auto moved = make_optimizer(options, got);
    for (int i = 0; i < 8; ++i) {
      ASSERT_TRUE(
          partial_of(*moved).move_state(i % 3 == 1 ? nullptr : memory.host));
      if (i == 5) {
        const NamedTensors saved = testing::copy_of(moved->state());
        moved = make_optimizer(options, got);
        ASSERT_TRUE(partial_of(*moved).move_state(memory.host));
        moved->load(saved);
      }
      set_gradients(expected, i);
      set_gradients(got, i);
      resident->step(0.01);
      moved->step(0.01);
    }
    expect_equal(got, expected, options.name);
    expect_equal(moved->state(), resident->state(), options.name);
    // A state from before the first update.
    moved->load({});
    EXPECT_TRUE(moved->state().empty());
    NamedTensors again = testing::copy_of(got);
    const auto fresh = make_optimizer(options, again);
    set_gradients(got, 9);
    set_gradients(again, 9);
    fresh->step(0.01);
    moved->step(0.01);
    expect_equal(got, again, options.name);
  }
  EXPECT_EQ(memory.host->held_bytes(), 0);
}

TEST(HostState, TakesDeviceMemoryDuringAnUpdateOnly) {
  constexpr int64_t kChunk = 64 << 10;
  NamedTensors parameters;
  for (int i = 0; i < 16; ++i) {
    parameters.emplace_back("p" + std::to_string(i),
                            torch::randn({256, 256}, on_device()));
    parameters.back().second.requires_grad_();
  }
  const int64_t state = 2 * 16 * 256 * 256 * 4;
  const HostMemory memory(kChunk);
  const auto optimizer = make_optimizer({}, parameters);
  ASSERT_TRUE(partial_of(*optimizer).move_state(memory.host));
  EXPECT_EQ(partial_of(*optimizer).host_state_bytes(), state);
  EXPECT_EQ(memory.host->held_bytes(), state);
  set_random_gradients(parameters, 1);
  const MemoryMeter meter(device());
  optimizer->step(0.1);
  EXPECT_EQ(meter.live_bytes(), meter.start_bytes());
  EXPECT_TRUE(optimizer->held().empty());
  if (device().is_cuda()) return;
  // Three buffers, and temporaries of the values of one.
  EXPECT_LE(meter.peak_increase_bytes(), 4 * kChunk);
  EXPECT_GE(meter.peak_increase_bytes(), 3 * kChunk);
}

TEST(HostState, StaysOnTheDeviceIfTheHostHasNoRoom) {
  const HostMemory memory(1 << 20, /*limit=*/100'000);
  for (OptimizerOptions options : all_optimizers()) {
    if (options.name != "adamw") continue;
    NamedTensors expected = mixed_parameters();
    NamedTensors got = mixed_parameters();
    const auto resident = make_optimizer(options, expected);
    const auto other = make_optimizer(options, got);
    for (int i = 0; i < 3; ++i) {
      EXPECT_FALSE(partial_of(*other).move_state(memory.host));
      EXPECT_EQ(partial_of(*other).host_state_bytes(), 0);
      set_gradients(expected, i);
      set_gradients(got, i);
      resident->step(0.01);
      other->step(0.01);
    }
    expect_equal(got, expected, "without room");
  }
  EXPECT_EQ(memory.host->held_bytes(), 0);
}

/// A step in which an allocation fails changes nothing and can be repeated.
TEST(HostState, SurvivesFailedAllocations) {
  if (device().is_cuda()) GTEST_SKIP() << "failures are injected on the CPU";
  const HostMemory memory(10'000);
  for (const OptimizerOptions& options : all_optimizers()) {
    NamedTensors expected = mixed_parameters();
    const auto resident = make_optimizer(options, expected);
    for (int i = 0; i < 2; ++i) {
      set_gradients(expected, i);
      resident->step(0.01);
    }
    bool failed = true;
    for (int64_t after = 0; failed; ++after) {
      NamedTensors got = mixed_parameters();
      const auto streamed = make_optimizer(options, got);
      ASSERT_TRUE(partial_of(*streamed).move_state(memory.host));
      bool repeatable = true;
      for (int i = 0; i < 2; ++i) {
        set_gradients(got, i);
        if (i == 0) {
          streamed->step(0.01);
          continue;
        }
        const AllocationFailure failure(after);
        try {
          streamed->step(0.01);
          failed = false;
        } catch (const c10::Error& error) {
          if (!is_out_of_memory(error)) {
            // Between two groups.
            EXPECT_FALSE(options.groups.empty()) << error.what();
            repeatable = false;
            break;
          }
          streamed->step(0.01);
        }
      }
      if (!repeatable) continue;
      expect_equal(got, expected, options.name + " " + std::to_string(after));
    }
  }
}

/// Every chunk is on the device while it is changed, and in no other state.
TEST(HostState, PassesChunksInOrder) {
  const HostMemory memory(1 << 20);
  constexpr int64_t kBytes = 4096;
  for (const size_t count : {0, 1, 2, 3, 7}) {
    at::Tensor block =
        memory.host->allocate(std::max<int64_t>(1, kBytes * int64_t(count)));
    block.fill_(5);
    detail::StateRing ring(*memory.host, device(), kBytes, count);
    std::vector<std::vector<detail::StateRing::Part>> chunks;
    for (size_t i = 0; i < count; ++i) {
      char* host = static_cast<char*>(block.data_ptr()) + i * kBytes;
      char* buffer = static_cast<char*>(ring.buffer(i).data_ptr());
      chunks.push_back({{host, buffer, kBytes / 2},
                        {host + kBytes / 2, buffer + kBytes / 2, kBytes / 2}});
    }
    size_t calls = 0;
    ring.pass(chunks, [&](size_t i) {
      EXPECT_EQ(i, calls++);
      torch::Tensor(ring.buffer(i)).add_(int64_t(i));
    });
    EXPECT_EQ(calls, count);
    memory.host->synchronize();
    for (size_t i = 0; i < count; ++i) {
      const auto part = block.narrow(0, int64_t(i) * kBytes, kBytes);
      EXPECT_TRUE(part.eq(5 + int64_t(i)).all().item<bool>()) << i;
    }
  }
}

}  // namespace
}  // namespace reprise
