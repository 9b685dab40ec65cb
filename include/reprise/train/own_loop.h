#pragma once

#include <reprise/train/planning.h>
#include <reprise/verify/verify.h>

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

/// Plans for a training loop of the caller, without a Trainer and a dataset:
///
///     Plan plan = plan_model(model, batch, {.global_batch = 64,
///                                           .memory = parse_bytes("8GiB")},
///                            {.optimizer = make}).plan;
///     PlannedStep step(model, plan);
///     while (read_next(batch)) {
///       step.begin(batch.count);
///       for (const Tensors& micro : split(batch.tensors, plan.micro_batch))
///         step.add(micro, micro[0].size(0));
///       step.clip(1.0);
///       double loss = step.update(optimizer);
///     }
namespace reprise {

/// How the loop of the caller updates its model, and how to measure it.
struct ModelPlanOptions {
  /// Makes an optimizer of the kind that the loop uses, to measure its state and
  /// its time: make_optimizer(…), or wrap_optimizer(…) for one of LibTorch. Null:
  /// the plan has no memory for one, because the optimizer has no state or has
  /// allocated it already.
  std::function<std::unique_ptr<Optimizer>(const NamedTensors& parameters)>
      optimizer{};
  /// Refuse a chain that returns the mean of the losses; see check_loss().
  bool check_loss = true;
  PlanningOptions planning{};
};

/// Plans the training of `model` by a loop of the caller, on the device that its
/// parameters are on. `sample` has at least one sample, as the loop passes them
/// to the chain; the first dimension of each tensor counts the samples. Batches
/// of other sizes are made by repeating these samples.
///
/// All memory that is in use on the device counts: other models, their
/// optimizers, batches. So plan before the first backward; gradients and
/// optimizer state that exist already would count twice. Parameters, buffers,
/// gradients and random generators are restored afterwards, and the model stays
/// in training mode. Plans use no CUDA graphs. Measurements are not stored on
/// disk.
///
/// A budget that nothing fits into is no error; see PlanResult::feasible. Throws
/// c10::Error if the chain cannot be trained (check_chain(), check_loss()) or
/// the request is not valid.
PlanResult plan_model(const Model& model, const Batch& sample,
                      const PlanRequest& request,
                      const ModelPlanOptions& options = {});

/// Overload for batches of other forms: `make` returns a batch of that many
/// samples, on any device. check_loss() is not called.
PlanResult plan_model(const Model& model,
                      const std::function<Batch(int64_t samples)>& make,
                      const PlanRequest& request,
                      const ModelPlanOptions& options = {});

/// Divides tensors into micro-batches of `micro_batch` samples along the first
/// dimension, without copies. The last one has the remainder. Undefined tensors
/// stay undefined. Throws c10::Error if `micro_batch` is not positive or the
/// tensors have different numbers of samples.
std::vector<Tensors> split(const Tensors& batch, int64_t micro_batch);

/// Runs micro-batches by a plan, in a loop of the caller: with the schedule of
/// the plan, under autocast in its precision, and with the weight copies that it
/// assumes. Adds up the gradients of a window like an Accumulator, whose rules
/// apply. Results are those of a plain loop with the same micro-batches; in fp32
/// on the CPU they are bit-identical.
///
/// Several objects may exist at once, for several models. Two windows that are
/// open at the same time must not share parameters (c10::Error). Not
/// thread-safe.
class PlannedStep {
 public:
  /// `plan` comes from plan_model() for the same model. Throws c10::Error if its
  /// schedule is for another number of stages or for other variants, or if it
  /// updates parameters in the backward.
  PlannedStep(const Model& model, const Plan& plan);
  ~PlannedStep();
  PlannedStep(PlannedStep&&) noexcept;
  PlannedStep& operator=(PlannedStep&&) noexcept;

  const Plan& plan() const;

  /// Opens a window of `total_count` samples or tokens; see Accumulator::begin().
  /// Gradients are multiplied by `loss_scale`, for a GradScaler in fp16. Throws
  /// c10::Error if a stage has parameters that require gradients and are not
  /// owned by Model::root: the loop would not update them.
  void begin(double total_count, double loss_scale = 1);

  /// Runs forward and backward of one micro-batch of `count` samples or tokens,
  /// on the device. Adds to the `.grad` of the parameters.
  void add(const Tensors& micro_batch, double count);

  /// Scales the gradients of the complete window so that their norm is at most
  /// `max_norm`, and returns the norm before.
  torch::Tensor clip(double max_norm);

  /// Calls `step`, clears the gradients, and closes the window, which must be
  /// complete. Returns its mean loss. To take the gradients without an update,
  /// do so in `step`.
  double update(const std::function<void()>& step);
  double update(torch::optim::Optimizer& optimizer);

  /// Closes the window without an update and frees its gradients.
  void abandon();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// verify() for a model and a batch of training data. The model must be on the
/// device of the batch.
VerifyReport verify(const Model& model, const Batch& sample,
                    const Strategy& strategy,
                    const VerifyOptions& options = {});
/// Overload for all strategies of sample_strategies() that the chain is long
/// enough for.
std::vector<VerifyReport> verify(const Model& model, const Batch& sample,
                                 const VerifyOptions& options = {});

}  // namespace reprise
