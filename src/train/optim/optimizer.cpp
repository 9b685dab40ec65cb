#include "base/text_check.h"
#include "train/optim/registry.h"

#include <reprise/train/optimizer.h>

#include <cmath>

namespace reprise {
namespace detail {

// The registered optimizers. Each source file defines `NAME_info()`.
#define REPRISE_OPTIMIZERS(X) \
  X(sgd)                      \
  X(adam)                     \
  X(adamw)                    \
  X(adam8bit)                 \
  X(adamw8bit)                \
  X(adafactor)

#define REPRISE_DECLARE(name) OptimizerInfo name##_info();
REPRISE_OPTIMIZERS(REPRISE_DECLARE)
#undef REPRISE_DECLARE

const std::vector<OptimizerInfo>& optimizer_list() {
#define REPRISE_ENTRY(name) name##_info(),
  static const std::vector<OptimizerInfo> list = {
      REPRISE_OPTIMIZERS(REPRISE_ENTRY)};
#undef REPRISE_ENTRY
  return list;
}

#undef REPRISE_OPTIMIZERS

const OptimizerInfo& find_optimizer(std::string_view name) {
  for (const OptimizerInfo& info : optimizer_list()) {
    if (info.name == name) return info;
  }
  TORCH_CHECK(false, "[make_optimizer] ",
              one_of(optimizer_names())(std::string(name)));
}

std::string optimizers_with(bool OptimizerInfo::*property) {
  std::vector<std::string> names;
  for (const OptimizerInfo& info : optimizer_list()) {
    if (info.*property) names.push_back(info.name);
  }
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 < names.size() ? ", " : " or ";
    text += names[i];
  }
  return text;
}

}  // namespace detail

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
  return detail::find_optimizer(options.name).make(options, parameters);
}

const std::vector<std::string>& optimizer_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const auto& info : detail::optimizer_list()) list.push_back(info.name);
    return list;
  }();
  return names;
}

}  // namespace reprise
