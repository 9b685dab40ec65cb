// TrainingCosts: parameters in host memory or divided among ranks.
// Tested by tests/train/budget/parameters_planning_test.cpp.
#include "train/budget/model_state_guard.h"
#include "train/budget/training_costs.h"

#include <reprise/memory/meter.h>

#include <algorithm>
#include <vector>

namespace reprise::detail {

void TrainingCosts::place_parameters() const {
  const auto& host = setup_.host_parameters;
  if (!host || host->on_host() == moves_parameters()) return;
  if (!moves_parameters()) return host->move_to_device();
  TORCH_CHECK_WITH(OutOfMemoryError, host->move_to_host(),
                   "[--state] host-all: the host gives no memory for the "
                   "parameters");
}

void TrainingCosts::separate_moved(CostProfile& profile) const {
  if (setup_.sharded) {
    profile.moved_bytes = setup_.sharded->stage_bytes();
    profile.stage_wire_bytes = setup_.sharded->stage_wire_bytes();
    profile.moved_gradient_bytes.assign(profile.moved_bytes.size(), 0);
    profile.gathers_parameters = true;
    const Network& network = setup_.sharded->network();
    const double ranks = setup_.sharded->ranks();
    if (ranks > 1) {
      profile.to_device_bytes_per_ms =
          network.bytes_per_ms * ranks / (ranks - 1);
      profile.gather_delay_ms = network.latency_ms * (ranks - 1);
    }
    return;
  }
  if (!moves_parameters()) return;
  const HostParameters& host = *setup_.host_parameters;
  profile.moved_bytes = host.stage_bytes();
  profile.moved_gradient_bytes = host.stage_gradient_bytes();
  const Chain& chain = setup_.model.chain;
  for (int i = 0; i < chain.size(); ++i) {
    for (const auto& module : chain[i].modules()) {
      for (const auto& p : module->parameters()) {
        if (!host.moves(p)) continue;
        const int64_t bytes =
            allocated_bytes(static_cast<int64_t>(p.nbytes()), setup_.device);
        profile.fixed.parameters -= bytes;
        if (!p.requires_grad()) continue;
        profile.fixed.gradients -= bytes;
        profile.gradient_bytes[static_cast<size_t>(i)] -= bytes;
      }
    }
  }
}

LinkSpeed TrainingCosts::link() const {
  constexpr int64_t kBytes = int64_t{64} << 20;
  HostTensors& memory = *setup_.state_memory;
  const torch::Tensor there = memory.allocate(kBytes);
  if (!there.defined()) return {};
  const torch::Tensor here = torch::empty(
      {kBytes}, torch::TensorOptions(torch::kByte).device(setup_.device));
  const auto rate = [&](HostTensors::Direction direction) {
    const bool in = direction == HostTensors::Direction::kToDevice;
    const std::vector<HostTensors::Copy> copies = {
        {in ? here.data_ptr() : there.data_ptr(),
         in ? there.data_ptr() : here.data_ptr(), size_t{kBytes}}};
    const double ms = time_of(setup_.device, 5, [&] {
      memory.wait(*memory.start(copies, direction, nullptr));
    });
    return static_cast<double>(kBytes) / std::max(ms, 1e-3);
  };
  return {rate(HostTensors::Direction::kToDevice),
          rate(HostTensors::Direction::kToHost)};
}

}  // namespace reprise::detail
