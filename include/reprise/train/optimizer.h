#pragma once

#include <reprise/base/enum_text.h>
#include <reprise/data/safetensors.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace reprise {

/// Parameters that are updated with other settings than the rest: no weight decay for
/// norms and biases, another learning rate for a pretrained part. To freeze a parameter,
/// set its `requires_grad` to false.
struct ParameterGroup {
  /// Whether the parameter belongs to the group.
  std::function<bool(const std::string& name, const torch::Tensor& parameter)>
      contains;
  double lr_factor =
      1;  ///< learning rate of the group relative to that of the training
  std::optional<double> weight_decay{};  ///< nullopt: that of the optimizer
};

/// Hyperparameters of an optimizer.
struct OptimizerOptions {
  std::string name = "adamw";  ///< one of optimizer_names()
  double momentum = 0;         ///< sgd
  bool nesterov = false;       ///< sgd; requires momentum
  double beta1 = 0.9;          ///< adam, adamw, adam8bit, adamw8bit
  double beta2 = 0.999;        ///< as beta1
  double eps = 1e-8;           ///< as beta1
  /// Added to the gradient (sgd, adam, adam8bit) or decoupled (adamw,
  /// adamw8bit, adafactor).
  double weight_decay = 0;
  /// adam8bit, adamw8bit: names of parameters whose moments are not quantized.
  /// Embeddings should be listed: their gradients are mostly zeros with a few
  /// large values.
  std::vector<std::string> unquantized{};
  /// Other settings for some parameters; see ParameterGroup. The first group that a
  /// parameter belongs to applies.
  std::vector<ParameterGroup> groups{};
};

/// Updates parameters from their `.grad`; parameters without one are skipped.
/// Uses LibTorch's foreach operators, and its fused kernels if the device has them.
/// Results equal those of torch.optim (Adafactor: of Hugging Face's class with
/// relative steps off and the given rate). Temporaries stay below 32 MiB or the
/// size of the largest parameter, whichever is larger; those of the 8-bit kinds
/// always below 32 MiB. Not thread-safe.
///
/// adam8bit and adamw8bit store Adam's moments in one byte per value (Dettmers et
/// al. 2022): blocks of 256 values, each with its largest magnitude in fp32. The
/// moments of parameters with fewer than 4096 values, of types other than float,
/// and of those in `unquantized` are not quantized.
class Optimizer {
 public:
  virtual ~Optimizer() = default;

  /// Applies one update with learning rate `lr`. Gradients are only read. Does not
  /// synchronize with the device. If an allocation fails, nothing has changed: state
  /// and temporaries are allocated before the first write. If one fails between two
  /// writes nevertheless (a scalar), the error says so and is not one that
  /// is_out_of_memory() recognises.
  virtual void step(double lr) = 0;

  /// State to be saved, as named tensors such as "exp_avg.fc.weight". Empty before
  /// the first update. The tensors are not copied and change with the next update.
  /// Counters are copies: "step" (int64), the number of updates, and "step.fc.bias"
  /// for a parameter that had a gradient in fewer of them.
  ///
  /// sgd has "momentum" if it is used; adam and adamw "exp_avg" and "exp_avg_sq";
  /// adafactor "row" and "col" for parameters of two or more dimensions, else
  /// "square". adam8bit and adamw8bit have "exp_avg" and "exp_avg_sq" as uint8 codes
  /// with "exp_avg_max" and "exp_avg_sq_max", one float per block of 256; for
  /// parameters that are not quantized, the state of adam.
  virtual NamedTensors state() const = 0;

  /// All tensors held between updates: the state without its counters, and tables.
  virtual std::vector<torch::Tensor> held() const = 0;

  /// Copies such a state; later updates are bitwise the same as without the
  /// interruption. Throws c10::Error with the name if a tensor is unknown, missing,
  /// or has another shape or type; nothing has changed then.
  virtual void load(const NamedTensors& state) = 0;
};

/// Creates an optimizer of `parameters`. A parameter that appears twice (tied
/// weights) counts once, under its first name. Throws c10::Error on an unknown
/// optimizer (with the known ones), an option out of range, or a name in
/// `unquantized` that no parameter has.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options,
                                          const NamedTensors& parameters);

/// Wraps an optimizer of LibTorch, or of the caller derived from it, over the same
/// tensors as `parameters`. The learning rate of each of its groups is multiplied by
/// `lr` / (the rate that its first group has now). Its state is saved as one tensor, an
/// archive of LibTorch. Temporaries are those of the optimizer. If an allocation fails
/// within a step, parameters may be partly updated; the error then says so and is not one
/// that is_out_of_memory() recognises.
///
/// Throws c10::Error if it is null, has no parameters, a parameter that is not among
/// `parameters`, or a first learning rate of 0.
std::unique_ptr<Optimizer> wrap_optimizer(
    std::unique_ptr<torch::optim::Optimizer> optimizer,
    const NamedTensors& parameters);

/// Names of the optimizers: sgd, adam, adamw, adam8bit, adamw8bit, adafactor.
const std::vector<std::string>& optimizer_names();

/// Course of the learning rate after the warm-up.
enum class LrScheduleKind { kConstant, kCosine };

template <>
struct EnumText<LrScheduleKind> {
  static constexpr std::array<std::string_view, 2> names{"constant", "cosine"};
};

/// Learning rate of each update: a linear warm-up from 0 to `base`, then constant
/// or a half cosine down to `lowest`.
struct LrScheduleOptions {
  double base = 1e-3;
  LrScheduleKind schedule = LrScheduleKind::kConstant;
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;  ///< updates of the whole training; used by cosine
  double lowest = 0;        ///< last learning rate of cosine
};

/// Learning rate of update `step`, counted from 0: base × (step + 1) /
/// warmup_steps during the warm-up; `lowest` from update total_steps on with
/// cosine. Throws c10::Error if an option is out of range or if cosine has no
/// updates after the warm-up.
double rate_at(const LrScheduleOptions& options, int64_t step);

/// How the learning rate depends on the global batch.
enum class LrScaling { kNone, kLinear, kSqrt };

template <>
struct EnumText<LrScaling> {
  static constexpr std::array<std::string_view, 3> names{"none", "linear",
                                                         "sqrt"};
};

/// Learning rate for a global batch of `batch`, given one tuned for `base_batch`:
/// rate × batch / base_batch (linear), rate × √(batch / base_batch) (sqrt) or
/// `rate`. Throws c10::Error if a batch is not above 0.
double scale_rate(double rate, LrScaling scaling, double batch,
                  double base_batch);

}  // namespace reprise
