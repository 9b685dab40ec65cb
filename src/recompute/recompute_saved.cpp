#include "compat/autocast.h"
#include "compat/saved_tensors.h"
#include "recompute/holding_hooks.h"

#include <reprise/recompute/checkpoint.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <utility>

namespace reprise {
namespace {

using torch::autograd::SavedVariable;

/// How to compute a value again. Tensors that were to be saved share it.
class Recipe {
 public:
  Recipe(const Tensors& inputs,
         std::function<torch::Tensor(const Tensors&)> again)
      : again_(std::move(again)), autocast_(compat::AutocastState::current()) {
    for (const auto& input : inputs) {
      inputs_.emplace_back(input, /*is_output=*/false);
    }
  }

  torch::Tensor run() const {
    const torch::NoGradGuard no_grad;
    const compat::AutocastGuard autocast(autocast_);
    Tensors inputs;
    for (const auto& input : inputs_) inputs.push_back(input.unpack().detach());
    return again_(inputs);
  }

 private:
  std::function<torch::Tensor(const Tensors&)> again_;
  compat::AutocastState autocast_;
  std::vector<SavedVariable> inputs_;  // as the enclosing scope saves them
};

class RecomputedHooks final : public compat::SavedTensorHooks {
 public:
  RecomputedHooks(const torch::Tensor& value, std::shared_ptr<Recipe> recipe,
                  std::unique_ptr<compat::SavedTensorHooks> usual)
      : value_(&value), recipe_(std::move(recipe)), usual_(std::move(usual)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    const bool same = tensor.is_alias_of(*value_) &&
                      tensor.scalar_type() == value_->scalar_type() &&
                      tensor.numel() == value_->numel() &&
                      tensor.is_contiguous();
    if (same) {
      sizes_ = tensor.sizes().vec();
      type_ = tensor.scalar_type();
      usual_.reset();
    } else {
      recipe_.reset();
      usual_->call_pack_hook(tensor);
    }
  }

  at::Tensor call_unpack_hook() override {
    if (usual_) return usual_->call_unpack_hook();
    const torch::Tensor made = recipe_->run();
    TORCH_CHECK(made.defined() && made.is_contiguous() &&
                    made.numel() == c10::multiply_integers(sizes_) &&
                    made.scalar_type() == type_,
                "[RecomputeSaved] expected the function to return the value "
                "again, contiguous ",
                type_, " ", sizes_, ", got ",
                made.defined() ? made.toString() : "nothing", " ",
                made.defined() ? made.sizes() : at::IntArrayRef());
    return made.view(sizes_);
  }

 private:
  const torch::Tensor* value_;  // used while the scope exists
  std::shared_ptr<Recipe> recipe_;
  std::unique_ptr<compat::SavedTensorHooks> usual_;
  std::vector<int64_t> sizes_;
  torch::ScalarType type_ = torch::kFloat;
};

class RecomputedPolicy final : public compat::SavedTensorPolicy {
 public:
  RecomputedPolicy(torch::Tensor value, std::shared_ptr<Recipe> recipe)
      : value_(std::move(value)),
        recipe_(std::move(recipe)),
        outer_(compat::SavedTensorScope::current()) {}

  std::unique_ptr<compat::SavedTensorHooks> make_hooks() override {
    auto usual = outer_ ? outer_->make_hooks() : nullptr;
    if (!usual) usual = std::make_unique<detail::HoldingHooks>();
    return std::make_unique<RecomputedHooks>(value_, recipe_, std::move(usual));
  }
  bool keeps() const override { return !outer_ || outer_->keeps(); }

 private:
  torch::Tensor value_;
  std::shared_ptr<Recipe> recipe_;
  std::shared_ptr<compat::SavedTensorPolicy> outer_;
};

}  // namespace

struct RecomputeSaved::Impl {
  Impl(const torch::Tensor& value, const Tensors& inputs, Function again)
      : scope(std::make_shared<RecomputedPolicy>(
            value, std::make_shared<Recipe>(inputs, std::move(again)))) {}
  compat::SavedTensorScope scope;
};

RecomputeSaved::RecomputeSaved(const torch::Tensor& value,
                               const Tensors& inputs, Function again) {
  TORCH_CHECK(value.defined() && value.is_contiguous(),
              "[RecomputeSaved] expected a contiguous value, got ",
              value.defined() ? "one that is not; use contiguous() before the "
                                "layers that save it"
                              : "none");
  if (!torch::GradMode::is_enabled()) return;
  impl_ = std::make_unique<Impl>(value, inputs, std::move(again));
}

RecomputeSaved::~RecomputeSaved() = default;

}  // namespace reprise
