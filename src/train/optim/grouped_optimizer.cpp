#include "train/optim/grouped_optimizer.h"

#include "train/optim/partial_optimizer.h"

#include <reprise/memory/meter.h>

#include <c10/util/Exception.h>

#include <cmath>
#include <set>
#include <utility>

namespace reprise::detail {
namespace {

constexpr const char* kStep = "step";

class GroupedOptimizer final : public Optimizer, public PartialOptimizer {
 public:
  struct Part {
    std::unique_ptr<Optimizer> optimizer;
    double lr_factor = 1;
    std::set<std::string> names{};  // of its parameters
  };

  explicit GroupedOptimizer(std::vector<Part> parts)
      : parts_(std::move(parts)) {}

  void begin_update(double lr) override {
    for (Part& part : parts_) {
      partial(part).begin_update(lr * part.lr_factor);
    }
  }
  void update_some(const std::vector<torch::Tensor>& parameters,
                   bool captured) override {
    for_each_part(
        [&](Part& part) { partial(part).update_some(parameters, captured); });
  }
  void end_update(const std::vector<torch::Tensor>& updated) override {
    for (Part& part : parts_) partial(part).end_update(updated);
  }
  std::string capture_refusal() const override {
    for (const Part& part : parts_) {
      if (auto reason = partial(part).capture_refusal(); !reason.empty()) {
        return reason;
      }
    }
    return "";
  }

  bool move_state(std::shared_ptr<HostTensors> host, double share) override {
    for (size_t i = 0; i < parts_.size(); ++i) {
      if (partial(parts_[i]).move_state(host, share)) continue;
      for (size_t j = 0; j < i; ++j) partial(parts_[j]).move_state(nullptr, 1);
      return false;
    }
    return true;
  }
  void round_stochastically() override {
    for (Part& part : parts_) partial(part).round_stochastically();
  }
  int64_t host_state_bytes() const override {
    int64_t bytes = 0;
    for (const Part& part : parts_) bytes += partial(part).host_state_bytes();
    return bytes;
  }

  // Once a part has been updated, the window can no longer be repeated.
  void step(double lr) override {
    for_each_part(
        [&](Part& part) { part.optimizer->step(lr * part.lr_factor); });
  }

  NamedTensors state() const override {
    NamedTensors all;
    for (size_t i = 0; i < parts_.size(); ++i) {
      for (auto& [name, tensor] : parts_[i].optimizer->state()) {
        all.emplace_back(name == kStep ? step_name(i) : name, tensor);
      }
    }
    return all;
  }

  std::vector<torch::Tensor> held() const override {
    std::vector<torch::Tensor> all;
    for (const Part& part : parts_) {
      const auto own = part.optimizer->held();
      all.insert(all.end(), own.begin(), own.end());
    }
    return all;
  }

  void load(const NamedTensors& state) override {
    std::vector<NamedTensors> parts(parts_.size());
    for (const auto& [name, tensor] : state) {
      const auto [part, own] = part_of(name);
      TORCH_CHECK(part < parts_.size(), "[optimizer] the state has '", name,
                  "', which belongs to no parameter");
      parts[part].emplace_back(own, tensor);
    }
    for (size_t i = 0; i < parts_.size(); ++i) {
      parts_[i].optimizer->load(parts[i]);
    }
  }

 private:
  /// Calls `update`. If an allocation fails after the first part, the error is not one that
  /// is_out_of_memory() recognises.
  template <class Update>
  void for_each_part(const Update& update) {
    for (size_t i = 0; i < parts_.size(); ++i) {
      try {
        update(parts_[i]);
      } catch (const c10::Error& error) {
        TORCH_CHECK(i == 0, "[optimizer] group ", i,
                    " could not be updated after the groups before it: ",
                    is_out_of_memory(error) ? "no memory"
                                            : error.what_without_backtrace(),
                    "; resume from the last saved state");
        throw;
      }
    }
  }

  /// All optimizers that make_optimizer() returns can update parts.
  static PartialOptimizer& partial(const Part& part) {
    return dynamic_cast<PartialOptimizer&>(*part.optimizer);
  }

  static std::string step_name(size_t part) {
    return std::string(kStep) + "#" + std::to_string(part);
  }

  /// Returns the part that the state tensor `name` belongs to, and its name there.
  std::pair<size_t, std::string> part_of(const std::string& name) const {
    for (size_t i = 0; i < parts_.size(); ++i) {
      if (name == step_name(i)) return {i, kStep};
    }
    // "exp_avg.fc.weight": the kind has no dot.
    const size_t dot = name.find('.');
    const std::string parameter =
        dot == std::string::npos ? "" : name.substr(dot + 1);
    for (size_t i = 0; i < parts_.size(); ++i) {
      if (parts_[i].names.contains(parameter)) return {i, name};
    }
    return {parts_.size(), name};
  }

  std::vector<Part> parts_;
};

void check(const ParameterGroup& group) {
  TORCH_CHECK(group.contains != nullptr,
              "[make_optimizer] expected a group to say which parameters it "
              "contains, got null");
  TORCH_CHECK(std::isfinite(group.lr_factor) && group.lr_factor >= 0,
              "[make_optimizer] expected an lr_factor of 0 or more, got ",
              group.lr_factor);
}

}  // namespace

std::unique_ptr<Optimizer> make_grouped_optimizer(
    const OptimizerOptions& options, const NamedTensors& parameters) {
  for (const ParameterGroup& group : options.groups) check(group);
  // The last one has the parameters of no group.
  std::vector<NamedTensors> lists(options.groups.size() + 1);
  std::set<const c10::TensorImpl*> seen;  // tied parameters count once
  for (const auto& [name, parameter] : parameters) {
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    size_t at = 0;
    while (at < options.groups.size() &&
           !options.groups[at].contains(name, parameter)) {
      ++at;
    }
    lists[at].emplace_back(name, parameter);
  }
  std::vector<GroupedOptimizer::Part> parts;
  for (size_t i = 0; i < lists.size(); ++i) {
    if (lists[i].empty()) continue;
    OptimizerOptions own = options;
    own.groups.clear();
    double lr_factor = 1;
    if (i < options.groups.size()) {
      own.weight_decay =
          options.groups[i].weight_decay.value_or(options.weight_decay);
      lr_factor = options.groups[i].lr_factor;
    }
    GroupedOptimizer::Part part{.optimizer = nullptr, .lr_factor = lr_factor};
    for (const auto& item : lists[i]) part.names.insert(item.first);
    std::erase_if(own.unquantized, [&](const std::string& name) {
      return !part.names.contains(name);
    });
    part.optimizer = make_optimizer(own, lists[i]);
    parts.push_back(std::move(part));
  }
  return std::make_unique<GroupedOptimizer>(std::move(parts));
}

}  // namespace reprise::detail
