#include "train/step/micro_step.h"

#include "accumulate/small_gradients.h"
#include "train/step/oom_retry.h"

#include <reprise/memory/meter.h>

#include <exception>
#include <utility>

namespace reprise::detail {

MicroStep::MicroStep(torch::Device device,
                     const compat::AutocastState& autocast,
                     std::vector<torch::Tensor> small)
    : device_(device), autocast_(autocast), small_(std::move(small)) {}

std::vector<torch::Tensor> MicroStep::small_of(
    torch::Device device, const std::vector<torch::Tensor>& parameters,
    const WeightCopies* copies) {
  if (!device.is_cuda()) return {};
  auto small = smallest_parameters(parameters);
  return copies == nullptr ? small : without(small, copies->weights());
}

int64_t MicroStep::held_bytes(torch::Device device) {
  return 2 *
         allocated_bytes(sizeof(double), device);  // the weight and the loss
}

void MicroStep::set_weight(double weight) {
  if (weight_on_device_.defined() && weight == weight_) return;
  if (!weight_on_device_.defined()) {
    weight_on_device_ =
        torch::empty({}, torch::dtype(torch::kDouble).device(device_));
  }
  weight_on_device_.fill_(weight);
  weight_ = weight;
}

void MicroStep::run(Execution& execution, const Tensors& batch,
                    const Run& how) {
  TORCH_INTERNAL_ASSERT(weight_on_device_.defined());
  Tensors outputs;
  {
    const compat::AutocastGuard autocast(autocast_);
    outputs = execution.forward(batch);
  }
  if (how.profile != nullptr) how.profile->forward_done();
  const torch::Tensor& loss = outputs[0];
  TORCH_CHECK(
      loss.defined() && loss.numel() == 1 && loss.is_floating_point(),
      "[Trainer] expected the first output of the chain to be the sum of "
      "the losses, one floating-point value, got ",
      loss.defined() ? c10::str(loss.scalar_type(), " of shape ", loss.sizes())
                     : "an undefined tensor",
      "; let the last stage return the sum");
  TORCH_CHECK(
      execution.outputs_require_grad().at(0),
      "[Trainer] expected a loss that requires a gradient, got one that "
      "does not; train at least one parameter, and compute the loss "
      "without detach()");
  Tensors gradients(outputs.size());  // further outputs have none
  gradients[0] = torch::empty_like(loss).copy_(weight_on_device_);
  // Nothing may fail after a backward that updates parameters.
  if (how.counts && !loss_.defined()) loss_ = torch::zeros_like(loss);
  SmallGradients small(how.final_on_the_way ? std::vector<torch::Tensor>{}
                                            : small_);
  run_backward(execution, std::move(gradients), how);
  small.add();
  if (how.counts) loss_.add_(outputs[0]);
}

void MicroStep::run_backward(Execution& execution, Tensors gradients,
                             const Run& how) {
  std::exception_ptr failure;
  std::string message;
  try {
    execution.backward(std::move(gradients));
  } catch (const c10::Error& error) {
    if (!how.recover || !is_out_of_memory(error)) throw;
    failure = std::current_exception();
    message = first_line(error);
  }
  // Outside of the handler, where the frames of the failed backward are gone.
  if (failure && !how.recover(message)) std::rethrow_exception(failure);
}

void MicroStep::clear_loss() {
  if (loss_.defined()) loss_.zero_();
}

void MicroStep::set_loss(const torch::Tensor& loss) {
  // Copy in place if possible, because a CUDA graph adds to this address.
  if (loss_.defined() && loss_.scalar_type() == loss.scalar_type()) {
    loss_.copy_(loss);
  } else {
    loss_ = loss.to(device_).clone();
  }
}

}  // namespace reprise::detail
