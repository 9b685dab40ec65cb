#include "train/optim/optimizers.h"

#include <reprise/train/optimizer.h>

#include <cmath>

namespace reprise {
namespace {

void check(const OptimizerOptions& options) {
  const auto in = [](const char* name, double value, bool good,
                     const char* expected) {
    TORCH_CHECK(std::isfinite(value) && good, "[make_optimizer] expected ",
                name, " ", expected, ", got ", value);
  };
  in("momentum", options.momentum, options.momentum >= 0, "of 0 or more");
  in("beta1", options.beta1, options.beta1 >= 0 && options.beta1 < 1,
     "in [0, 1)");
  in("beta2", options.beta2, options.beta2 >= 0 && options.beta2 < 1,
     "in [0, 1)");
  in("eps", options.eps, options.eps > 0, "above 0");
  in("weight_decay", options.weight_decay, options.weight_decay >= 0,
     "of 0 or more");
  TORCH_CHECK(!options.nesterov || options.momentum > 0,
              "[make_optimizer] expected momentum above 0 with nesterov, got ",
              options.momentum);
}

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options,
                                          const NamedTensors& parameters) {
  check(options);
  if (options.name == "sgd") return make_sgd(options, parameters);
  if (options.name == "adafactor") return make_adafactor(options, parameters);
  if (options.name == "adam" || options.name == "adamw") {
    return make_adam(options, parameters);
  }
  if (options.name == "adam8bit" || options.name == "adamw8bit") {
    return make_adam8bit(options, parameters);
  }
  std::string known;
  for (const auto& name : optimizer_names()) {
    known += (known.empty() ? "" : ", ") + name;
  }
  TORCH_CHECK(false, "[make_optimizer] expected one of ", known, ", got '",
              options.name, "'");
}

const std::vector<std::string>& optimizer_names() {
  static const std::vector<std::string> names = {
      "sgd", "adam", "adamw", "adam8bit", "adamw8bit", "adafactor"};
  return names;
}

}  // namespace reprise
