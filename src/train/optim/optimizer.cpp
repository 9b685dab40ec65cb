#include "base/text_check.h"
#include "train/optim/grouped_optimizer.h"
#include "train/optim/registry.h"

#include <reprise/train/optimizer.h>

#include <cmath>

namespace reprise {
namespace detail {

// reprise_optimizers.inc has the families that CMakeLists.txt registers.
#define REPRISE_REGISTERED(family) \
  std::vector<OptimizerInfo> family##_optimizers();
#include <reprise_optimizers.inc>
#undef REPRISE_REGISTERED

const std::vector<OptimizerInfo>& optimizer_list() {
  static const std::vector<OptimizerInfo> list = [] {
    std::vector<OptimizerInfo> all;
    const auto add = [&all](const std::vector<OptimizerInfo>& family) {
      all.insert(all.end(), family.begin(), family.end());
    };
#define REPRISE_REGISTERED(family) add(family##_optimizers());
#include <reprise_optimizers.inc>
#undef REPRISE_REGISTERED
    return all;
  }();
  return list;
}

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
  if (!options.groups.empty()) {
    return detail::make_grouped_optimizer(options, parameters);
  }
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
