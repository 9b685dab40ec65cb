#include <reprise/lean/weight_copies.h>
#include <reprise/torch/lists.h>

#include <c10/util/Exception.h>
#include <torch/torch.h>

#include <shared_mutex>
#include <unordered_map>

namespace reprise {
namespace {

using torch::Tensor;

// Tensor cores want round sizes.
constexpr int64_t kRoundRows = 128;

constexpr int64_t kMostOnes = int64_t{1} << 16;

struct WeightCopy {
  Tensor padded, copy;
  Tensor ones;  // undefined on the CPU
  int64_t version = -1;  // of the weight when it was copied; -1: too old
};

/// By weight. Any thread may look: the backward's threads compute forwards again.
struct WeightRegistry {
  std::shared_mutex mutex;
  std::unordered_map<const c10::TensorImpl*, WeightCopy> entries;
};

WeightRegistry& weight_registry() {
  static WeightRegistry* all = new WeightRegistry;  // outlives every thread
  return *all;
}

Tensor empty_copy(const Tensor& weight, torch::ScalarType type) {
  auto sizes = weight.sizes().vec();
  if (weight.dim() == 2) {
    sizes[0] = (sizes[0] + kRoundRows - 1) / kRoundRows * kRoundRows;
  }
  const Tensor copy =
      torch::empty(sizes, weight.options().dtype(type).requires_grad(false));
  if (copy.size(0) > weight.size(0)) {
    copy.narrow(0, weight.size(0), copy.size(0) - weight.size(0)).zero_();
  }
  return copy;
}

}  // namespace

WeightCopies::WeightCopies(const std::vector<Tensor>& weights,
                           torch::ScalarType type) {
  const bool half = type == torch::kBFloat16 || type == torch::kHalf;
  TORCH_CHECK(half || type == torch::kFloat,
              "[WeightCopies] expected half or single precision, got ", type);
  Tensor ones;
  const torch::NoGradGuard no_grad;
  std::unordered_map<const c10::TensorImpl*, WeightCopy> made;
  for (const Tensor& weight : weights) {
    if (weight.scalar_type() != torch::kFloat || !weight.requires_grad() ||
        weight.dim() == 0) {
      continue;
    }
    const auto* key = weight.unsafeGetTensorImpl();
    if (made.contains(key)) continue;
    WeightCopy entry;
    entry.padded = half ? empty_copy(weight, type) : weight.detach();
    entry.copy = entry.padded.narrow(0, 0, weight.size(0));
    if (weight.is_cuda() && !ones.defined()) {
      ones = torch::ones({1, kMostOnes}, entry.copy.options());
    }
    entry.ones = ones;
    weights_.push_back(weight);
    if (half) {
      copies_.push_back(entry.padded);
      views_.push_back(entry.copy);
    }
    made.emplace(key, std::move(entry));
  }
  {
    WeightRegistry& all = weight_registry();
    const std::unique_lock lock(all.mutex);
    for (const auto& [key, entry] : made) {
      TORCH_CHECK(!all.entries.contains(key),
                  "[WeightCopies] another one has copies of a weight already");
    }
    all.entries.merge(made);
  }
  refresh();
}

WeightCopies::~WeightCopies() {
  WeightRegistry& all = weight_registry();
  const std::unique_lock lock(all.mutex);
  for (const Tensor& weight : weights_) {
    all.entries.erase(weight.unsafeGetTensorImpl());
  }
}

void WeightCopies::refresh() {
  const torch::NoGradGuard no_grad;
  if (!views_.empty()) compat::copy_list(views_, weights_);
  WeightRegistry& all = weight_registry();
  const std::unique_lock lock(all.mutex);
  for (const Tensor& weight : weights_) {
    all.entries.at(weight.unsafeGetTensorImpl()).version = weight._version();
  }
}

void WeightCopies::expire() {
  WeightRegistry& all = weight_registry();
  const std::unique_lock lock(all.mutex);
  for (const Tensor& weight : weights_) {
    all.entries.at(weight.unsafeGetTensorImpl()).version = -1;
  }
}

Tensor WeightCopies::find(const Tensor& weight, torch::ScalarType type,
                          bool padded) {
  WeightRegistry& all = weight_registry();
  const std::shared_lock lock(all.mutex);
  if (all.entries.empty()) return {};
  const auto found = all.entries.find(weight.unsafeGetTensorImpl());
  if (found == all.entries.end()) return {};
  const WeightCopy& entry = found->second;
  if (entry.version != weight._version() ||
      entry.copy.scalar_type() != type) {
    return {};
  }
  return padded ? entry.padded : entry.copy;
}

Tensor WeightCopies::ones(const Tensor& weight, int64_t count) {
  WeightRegistry& all = weight_registry();
  const std::shared_lock lock(all.mutex);
  const auto found = all.entries.find(weight.unsafeGetTensorImpl());
  if (found == all.entries.end() || count > kMostOnes) return {};
  const Tensor& row = found->second.ones;
  return row.defined() ? row.narrow(1, 0, count) : row;
}

}  // namespace reprise
