#include <reprise/lean/weight_copies.h>
#include <reprise/torch/lists.h>

#include <c10/util/Exception.h>
#include <torch/torch.h>

#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>

namespace reprise {
namespace {

using torch::Tensor;

// Tensor cores want round sizes.
constexpr int64_t kRoundRows = 128;

constexpr int64_t kMostOnes = int64_t{1} << 16;

struct WeightCopy {
  Tensor padded, copy;
  Tensor ones;           // undefined on the CPU
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

/// The shape of a copy, with its rows of zeros.
std::vector<int64_t> padded_sizes(const Tensor& weight) {
  auto sizes = weight.sizes().vec();
  if (weight.dim() == 2) {
    sizes[0] = (sizes[0] + kRoundRows - 1) / kRoundRows * kRoundRows;
  }
  return sizes;
}

}  // namespace

WeightCopies::WeightCopies(const std::vector<Tensor>& weights,
                           torch::ScalarType type) {
  const bool half = type == torch::kBFloat16 || type == torch::kHalf;
  TORCH_CHECK(half || type == torch::kFloat,
              "[WeightCopies] expected half or single precision, got ", type);
  const torch::NoGradGuard no_grad;
  std::unordered_set<const c10::TensorImpl*> seen;
  int64_t total = 0;
  for (const Tensor& weight : weights) {
    if (weight.scalar_type() != torch::kFloat || !weight.requires_grad() ||
        weight.dim() == 0 ||
        !seen.insert(weight.unsafeGetTensorImpl()).second) {
      continue;
    }
    weights_.push_back(weight);
    total += c10::multiply_integers(padded_sizes(weight));
  }
  if (weights_.empty()) return;
  // In one piece and in order: weights that lie together have copies that do.
  const auto options = weights_[0].options().dtype(type).requires_grad(false);
  if (half) copies_.push_back(torch::zeros({total}, options));
  const Tensor ones =
      weights_[0].is_cuda() ? torch::ones({1, kMostOnes}, options) : Tensor();
  std::unordered_map<const c10::TensorImpl*, WeightCopy> made;
  int64_t first = 0;
  for (const Tensor& weight : weights_) {
    WeightCopy entry;
    if (half) {
      const auto sizes = padded_sizes(weight);
      const int64_t count = c10::multiply_integers(sizes);
      entry.padded = copies_[0].narrow(0, first, count).view(sizes);
      entry.copy = entry.padded.narrow(0, 0, weight.size(0));
      views_.push_back(entry.copy);
      first += count;
    } else {
      entry.padded = entry.copy = weight.detach();
    }
    entry.ones = ones;
    made.emplace(weight.unsafeGetTensorImpl(), std::move(entry));
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
  if (entry.version != weight._version() || entry.copy.scalar_type() != type) {
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
