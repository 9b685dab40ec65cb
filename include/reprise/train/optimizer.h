#pragma once

#include <reprise/data/safetensors.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace reprise {

struct OptimizerOptions {
  std::string name = "adamw";  ///< one of optimizer_names()
  double momentum = 0;         ///< sgd
  bool nesterov = false;       ///< sgd; needs momentum
  double beta1 = 0.9;          ///< adam, adamw and their 8-bit kinds
  double beta2 = 0.999;        ///< the same
  double eps = 1e-8;           ///< the same
  /// Added to the gradient (sgd, adam, adam8bit) or decoupled (adamw,
  /// adamw8bit, adafactor).
  double weight_decay = 0;
  /// adam8bit, adamw8bit: names of parameters whose moments are not quantized.
  /// Those of embeddings belong here: their gradients are mostly zeros with a
  /// few large values.
  std::vector<std::string> unquantized;
};

/// Updates parameters from their `.grad`; those without one are left alone.
/// Works on lists of tensors at a time (foreach), and with LibTorch's fused
/// kernels where it has them for the device. Numbers are those of torch.optim
/// (Adafactor: of Hugging Face's with relative steps off and the given rate).
/// Temporaries stay below 32 MiB, or the size of the largest parameter where
/// that is more; those of the 8-bit kinds always below 32 MiB. One thread at a
/// time.
///
/// adam8bit and adamw8bit keep Adam's moments in a byte a value (Dettmers and
/// others 2022): blocks of 256 values, each with its largest magnitude in fp32.
/// Parameters of fewer than 4096 values or of another type than float, and those
/// in `unquantized`, keep them whole.
class Optimizer {
 public:
  virtual ~Optimizer() = default;

  /// One update with learning rate `lr`. Gradients are only read. Does not wait
  /// for the device. Where an allocation fails, nothing has changed: state and
  /// temporaries are taken before the first write. Should one fail all the same
  /// between two writes (a scalar), the error says so and is none that
  /// compat::is_out_of_memory() recognises.
  virtual void step(double lr) = 0;

  /// What it keeps between updates, for saving: a name a tensor, such as
  /// "exp_avg.fc.weight"; counters included. Empty before the first update.
  /// The tensors are its own and change with the next update, the counters
  /// copies: "step", int64, the updates so far, and "step.fc.bias" of a
  /// parameter that had a gradient in fewer of them.
  ///
  /// sgd keeps "momentum" where there is one; adam and adamw "exp_avg" and
  /// "exp_avg_sq"; adafactor "row" and "col" of a parameter of two dimensions
  /// or more, of another one "square". adam8bit and adamw8bit keep "exp_avg" and
  /// "exp_avg_sq" as uint8 codes, with "exp_avg_max" and "exp_avg_sq_max", a
  /// float a block of 256; of a parameter that is not quantized, what adam does.
  virtual NamedTensors state() const = 0;

  /// All that takes memory between updates: the state without its counters, and
  /// tables.
  virtual std::vector<torch::Tensor> held() const = 0;

  /// Takes a copy of such a state; updates then go on bit by bit as if they had
  /// never stopped. Throws c10::Error, with the name, where a tensor is unknown,
  /// missing, or has another shape or type; nothing has changed then.
  virtual void load(const NamedTensors& state) = 0;
};

/// `parameters` with their names; one that appears twice (tied weights) counts
/// once, under the first name. Throws c10::Error on an unknown name (with those
/// known), an option out of range or a name in `unquantized` that no parameter
/// has.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options,
                                          const NamedTensors& parameters);

/// sgd, adam, adamw, adam8bit, adamw8bit, adafactor.
const std::vector<std::string>& optimizer_names();

}  // namespace reprise
