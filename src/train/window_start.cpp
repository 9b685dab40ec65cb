#include "window_start.h"

#include <torch/utils.h>

#include <utility>

namespace reprise::train_detail {
namespace {

void copy_all(const std::vector<torch::Tensor>& from,
              const std::vector<torch::Tensor>& to) {
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
}

}  // namespace

WindowStart::WindowStart(torch::Device device,
                         std::vector<torch::Tensor> buffers)
    : device_(device), buffers_(std::move(buffers)) {}

void WindowStart::remember(const RunState& state, int64_t samples_here) {
  auto rng =
      compat::RngState::capture({torch::empty({0}, torch::device(device_))});
  if (copies_.empty()) {
    std::vector<torch::Tensor> copies;
    for (const auto& buffer : buffers_) {
      copies.push_back(torch::empty_like(buffer));
    }
    copies_ = std::move(copies);
  }
  copy_all(buffers_, copies_);
  rng_ = std::move(rng);
  state_ = state;
  samples_here_ = samples_here;
}

void WindowStart::restore() const {
  rng_.restore();
  copy_all(copies_, buffers_);
}

}  // namespace reprise::train_detail
