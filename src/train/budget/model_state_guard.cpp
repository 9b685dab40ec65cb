#include "train/budget/model_state_guard.h"

#include "compat/cuda.h"

namespace reprise::detail {
namespace {

torch::Tensor to_host(const torch::Tensor& tensor) {
  return tensor.is_cuda() ? tensor.detach().cpu() : tensor.detach().clone();
}

}  // namespace

ModelStateGuard::ModelStateGuard(const TrainSetup& setup, bool parameters)
    : host_(setup.host_parameters) {
  const Model& model = setup.model;
  const torch::NoGradGuard no_grad;
  const HostParameters::Readable readable(host_.get());
  const auto empty = torch::empty({0}, setup.device);
  rng_ = compat::RngState::capture({empty});
  for (auto& buffer : model.root->buffers()) {
    values_.emplace_back(buffer, buffer.detach().clone());
  }
  for (auto& parameter : model.root->parameters()) {
    // Copy to host memory, because a copy may not fit on the device. Frozen ones stay as
    // they are.
    if (parameters && parameter.requires_grad()) {
      values_.emplace_back(parameter, to_host(parameter));
    }
  }
  // Take the gradients last: if the above runs out of memory, the destructor
  // does not run and could not restore them.
  for (auto& parameter : model.root->parameters()) {
    gradients_.emplace_back(
        parameter, std::exchange(parameter.mutable_grad(), torch::Tensor()));
  }
}

ModelStateGuard::~ModelStateGuard() {
  const torch::NoGradGuard no_grad;
  if (host_) host_->forget_gradients();  // of the measurement
  const HostParameters::Readable readable(host_.get());
  for (auto& [parameter, gradient] : gradients_) {
    parameter.mutable_grad() = gradient;
  }
  for (auto& [tensor, before] : values_) tensor.detach().copy_(before);
  rng_.restore();
}

Batches::Batches(const TrainSetup& setup, int64_t size, Batch any)
    : size_(size), any_(std::move(any)) {
  LoaderOptions loading = make_loader_options(setup);
  loading.batch = size;
  if (setup.data.train->size() >= size) {
    loader_.emplace(setup.data.train, loading);
  } else if (loading.transform) {
    loading.transform(any_);
  }
}

Batch Batches::next() {
  if (!loader_) return any_;
  while (true) {
    auto batch = loader_->next();
    // The last batch of an epoch may be smaller.
    if (batch && batch->samples == size_) return std::move(*batch);
  }
}

}  // namespace reprise::detail
