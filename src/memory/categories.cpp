#include <reprise/memory/categories.h>
#include <reprise/memory/meter.h>

#include <algorithm>
#include <numeric>
#include <unordered_set>
#include <utility>

namespace reprise {
namespace {

using StorageSet = std::unordered_set<const void*>;

int64_t unseen_bytes(const at::Tensor& tensor, StorageSet& seen) {
  if (!tensor.defined() || !tensor.has_storage()) return 0;
  const auto& storage = tensor.storage();
  if (storage.data() == nullptr) return 0;  // its memory is elsewhere
  if (!seen.insert(storage.unsafeGetStorageImpl()).second) return 0;
  return allocated_bytes(static_cast<int64_t>(storage.nbytes()),
                         tensor.device());
}

}  // namespace

int64_t storage_bytes(at::TensorList tensors) {
  StorageSet seen;
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += unseen_bytes(tensor, seen);
  return bytes;
}

MemoryLedger::MemoryLedger(c10::Device device) : device_(device) {}

void MemoryLedger::claim(Category category, Source source) {
  TORCH_CHECK(category != Category::kWorkspace,
              "[MemoryLedger] kWorkspace holds what is not claimed and cannot "
              "be claimed itself");
  claims_.push_back({category, std::move(source)});
}

void MemoryLedger::claim_model(std::vector<at::Tensor> parameters,
                               std::vector<at::Tensor> buffers) {
  claim(Category::kGradients, [parameters] {
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : parameters) {
      if (parameter.grad().defined()) gradients.push_back(parameter.grad());
    }
    return gradients;
  });
  parameters.insert(parameters.end(), buffers.begin(), buffers.end());
  claim(Category::kParameters, [parameters] { return parameters; });
}

void MemoryLedger::claim_kept(const KeptMeter& meter) {
  kept_ = &meter;
}

MemoryBreakdown MemoryLedger::measure() const {
  MemoryBreakdown breakdown;
  breakdown.total_bytes = live_bytes(device_);
  StorageSet seen;
  for (const Claim& claim : claims_) {
    for (const at::Tensor& tensor : claim.source()) {
      if (!tensor.defined() || tensor.device().type() != device_.type()) {
        continue;
      }
      breakdown.bytes.at(static_cast<size_t>(claim.category)) +=
          unseen_bytes(tensor, seen);
    }
  }
  if (kept_ != nullptr) {
    auto& by_stage = breakdown.activations_by_stage;
    for (const auto& kept : kept_->live_storages()) {
      if (!seen.insert(kept.storage).second) continue;  // claimed already
      const auto stage = static_cast<size_t>(kept.stage);
      if (by_stage.size() <= stage) by_stage.resize(stage + 1);
      by_stage[stage] += kept.bytes;
      breakdown.bytes.at(static_cast<size_t>(Category::kActivations)) +=
          kept.bytes;
    }
  }
  const int64_t claimed = std::accumulate(breakdown.bytes.begin(),
                                          breakdown.bytes.end(), int64_t{0});
  breakdown.bytes.at(static_cast<size_t>(Category::kWorkspace)) =
      std::max<int64_t>(0, breakdown.total_bytes - claimed);
  return breakdown;
}

}  // namespace reprise
