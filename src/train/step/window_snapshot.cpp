#include "train/step/window_snapshot.h"

#include "compat/foreach.h"

#include <utility>

namespace reprise::detail {

WindowSnapshot::WindowSnapshot(torch::Device device,
                               std::vector<torch::Tensor> buffers)
    : device_(device), buffers_(std::move(buffers)) {}

void WindowSnapshot::remember(const RunState& state, int64_t samples_here) {
  remember_tensors();
  state_ = state;
  samples_here_ = samples_here;
}

void WindowSnapshot::remember_tensors() {
  auto rng =
      compat::RngState::capture({torch::empty({0}, torch::device(device_))});
  if (copies_.empty()) {
    std::vector<torch::Tensor> copies;
    for (const auto& buffer : buffers_) {
      copies.push_back(torch::empty_like(buffer));
    }
    copies_ = std::move(copies);
  }
  compat::copy_list(copies_, buffers_);
  rng_ = std::move(rng);
}

void WindowSnapshot::restore() const {
  rng_.restore();
  compat::copy_list(buffers_, copies_);
}

}  // namespace reprise::detail
