#pragma once

#include <reprise/train/optimizer.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace reprise::detail {

/// An optimizer that make_optimizer() knows by name. Its source file defines it; the
/// list in optimizer.cpp registers it.
struct OptimizerInfo {
  std::string name;
  std::unique_ptr<Optimizer> (*make)(const OptimizerOptions& options,
                                     const NamedTensors& parameters);
  bool has_momentum = false;  // uses `momentum` and `nesterov`
  bool has_betas = false;     // uses `beta1`, `beta2` and `eps`
  bool quantized = false;     // keeps its state in 8 bits
  /// Prefixes of the state tensors if each has one value per value of its parameter,
  /// so that ranks can divide them anywhere; null if they do not.
  std::vector<std::string> (*elementwise_state)(
      const OptimizerOptions& options) = nullptr;
};

/// All optimizers, in the order of the help.
const std::vector<OptimizerInfo>& optimizer_list();

/// Throws c10::Error, with the known names, if there is no such optimizer.
const OptimizerInfo& find_optimizer(std::string_view name);

/// Names of the optimizers with a property, such as &OptimizerInfo::has_betas:
/// "adam, adamw, adam8bit or adamw8bit".
std::string optimizers_with(bool OptimizerInfo::*property);

}  // namespace reprise::detail
