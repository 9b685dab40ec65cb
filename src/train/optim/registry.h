#pragma once

#include <reprise/train/optimizer.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace reprise::detail {

/// An optimizer that make_optimizer() knows by name. Its source file defines
/// `std::vector<OptimizerInfo> <family>_optimizers()` and is registered in
/// CMakeLists.txt. Tested by tests/train/optim/optimizer_test.cpp.
struct OptimizerInfo {
  std::string name;
  std::unique_ptr<Optimizer> (*make)(const OptimizerOptions& options,
                                     const NamedTensors& parameters);
  bool has_momentum = false;  // uses `momentum` and `nesterov`
  bool has_betas = false;     // uses `beta1`, `beta2` and `eps`
  bool quantized = false;     // keeps its state in 8 bits
  /// Prefixes of the state tensors if each of them has one value per parameter
  /// value, so that they can be sharded anywhere; null otherwise.
  std::vector<std::string> (*elementwise_state)(
      const OptimizerOptions& options) = nullptr;
};

/// Returns all optimizers, in the order of the help text.
const std::vector<OptimizerInfo>& optimizer_list();

/// Returns the optimizer `name`. Throws c10::Error with the known names if
/// there is none.
const OptimizerInfo& find_optimizer(std::string_view name);

/// Returns the names of the optimizers with a property. For example,
/// &OptimizerInfo::has_betas gives "adam, adamw, adam8bit or adamw8bit".
std::string optimizers_with(bool OptimizerInfo::*property);

}  // namespace reprise::detail
