// Tested by tests/recompute/host_parameters_test.cpp and
// tests/distributed/sharded_parameters_test.cpp.
#include "recompute/stage_parameters.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace reprise::detail {

using torch::Tensor;

void set_storage_memory(const Tensor& tensor, void* data) {
  tensor.storage().unsafeGetStorageImpl()->set_data_ptr(
      at::DataPtr(data, tensor.device()));
}

Tensor without_memory(const Tensor& tensor, torch::Device device) {
  const Tensor empty = torch::empty({0}, tensor.options().device(device));
  c10::StorageImpl* storage = empty.storage().unsafeGetStorageImpl();
  storage->set_data_ptr(at::DataPtr(nullptr, device));
  storage->set_nbytes(tensor.storage().nbytes());
  return empty.as_strided(tensor.sizes(), tensor.strides(),
                          tensor.storage_offset());
}

StageParameters::StageParameters(
    std::vector<std::vector<size_t>> units_of_stage)
    : units_of_stage_(std::move(units_of_stage)) {
  for (const auto& units : units_of_stage_) {
    for (const size_t unit : units) units_ = std::max(units_, unit + 1);
  }
}

Chain StageParameters::wrapped(
    const Chain& chain, const std::shared_ptr<StageParameters>& parameters) {
  std::vector<Stage> stages;
  for (int i = 0; i < chain.size(); ++i) {
    const Stage& stage = chain[i];
    const auto around = [parameters, i](Stage::Function function) {
      return [parameters, i, function](const Tensors& inputs) {
        if (parameters->away()) parameters->bring(i);
        return function(inputs);
      };
    };
    Stage same(stage.name(), around(stage.function()), stage.modules(),
               stage.takes());
    for (const auto& variant : stage.variants()) {
      same = same.with_variant(variant.name, around(variant.function));
    }
    stages.push_back(stage.kind().empty() ? same : same.of_kind(stage.kind()));
  }
  return Chain(std::move(stages));
}

std::vector<int> StageParameters::cuts() const {
  std::vector<int> cuts;
  for (int i = static_cast<int>(units_of_stage_.size()) - 1; i > 0; --i) {
    cuts.push_back(i);
  }
  return cuts;
}

void StageParameters::begin(const std::vector<StageVisit>& visits,
                            compat::WorkLane* lane) {
  if (!away()) return;
  abandon();
  lane_ = lane;
  visits_ = visits;
  visit_ = 0;
  running_ = true;
}

void StageParameters::before(const Op& op) {
  if (!running_ || op.kind == OpKind::kDiscard || op.kind == OpKind::kFetch) {
    return;
  }
  const bool same = visit_ > 0 && visits_[visit_ - 1].stage == op.stage;
  if (same) return;
  TORCH_INTERNAL_ASSERT(visit_ < visits_.size() &&
                        visits_[visit_].stage == op.stage);
  advance();
}

void StageParameters::advance() {
  const StageVisit visit = visits_[visit_];
  const StageVisit* next =
      visit_ + 1 < visits_.size() ? &visits_[visit_ + 1] : nullptr;
  std::vector<bool> stays(units_);
  const auto keep = [&](int stage) {
    for (const size_t unit : units_of_stage_[static_cast<size_t>(stage)]) {
      stays[unit] = true;
    }
  };
  keep(visit.stage);
  if (next != nullptr) keep(next->stage);
  for (size_t unit = 0; unit < units_; ++unit) {
    if (!stays[unit]) leave(unit);
  }
  // What left during the last visit has had its time.
  wait_for_left(1);
  fetch(visit, /*wait=*/true);
  ++visit_;
  // Plans count neighbours only; others are fetched when they are needed.
  if (next != nullptr && std::abs(next->stage - visit.stage) == 1) {
    fetch(*next, /*wait=*/false);
  }
}

void StageParameters::fetch(const StageVisit& visit, bool wait) {
  const auto& units = units_of_stage_[static_cast<size_t>(visit.stage)];
  for (const size_t unit : units) start_fetch(unit, visit.backward);
  if (!wait) return;
  for (const size_t unit : units) finish_fetch(unit);
}

void StageParameters::bring(int stage) {
  if (running_ || readable()) return;
  const auto& units = units_of_stage_[static_cast<size_t>(stage)];
  for (size_t unit = 0; unit < units_; ++unit) {
    if (std::find(units.begin(), units.end(), unit) == units.end()) {
      leave(unit);
    }
  }
  wait_for_left(0);
  fetch({stage, /*backward=*/false}, /*wait=*/true);
  brought(stage);
}

void StageParameters::end() {
  if (!running_) return;
  for (size_t unit = 0; unit < units_; ++unit) leave(unit);
  wait_for_left(0);
  stop();
}

void StageParameters::stop() {
  running_ = false;
  lane_ = nullptr;
}

}  // namespace reprise::detail
