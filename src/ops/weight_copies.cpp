#include "compat/foreach.h"

#include <reprise/ops/weight_copies.h>

#include <c10/util/Exception.h>
#include <torch/types.h>

#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>

namespace reprise {
namespace {

using torch::Tensor;

// Tensor cores want round sizes.
constexpr int64_t kRoundRows = 128;
constexpr int64_t kRoundValues = 8;  // of a vector

constexpr int64_t kMostOnes = int64_t{1} << 16;

struct WeightCopy {
  Tensor padded, copy;  // undefined: each use makes its own, or needs none
  torch::ScalarType type = torch::kFloat;
  bool each_use = false;
  Tensor ones;           // undefined on the CPU
  bool alone = true;     // nothing else adds to its gradient
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

/// What is known of `weight`, if anything is, whatever its age.
std::optional<WeightCopy> known_of(const Tensor& weight) {
  WeightRegistry& all = weight_registry();
  const std::shared_lock lock(all.mutex);
  const auto found = all.entries.find(weight.unsafeGetTensorImpl());
  if (found == all.entries.end()) return std::nullopt;
  return found->second;
}

bool is_fresh(const std::optional<WeightCopy>& known, const Tensor& weight) {
  return known && known->version == weight._version();
}

/// The shape of a copy, with its rows of zeros.
std::vector<int64_t> padded_sizes(const Tensor& weight) {
  auto sizes = weight.sizes().vec();
  const int64_t round = weight.dim() == 2 ? kRoundRows : kRoundValues;
  sizes[0] = (sizes[0] + round - 1) / round * round;
  return sizes;
}

}  // namespace

WeightCopies::WeightCopies(const std::vector<Tensor>& weights,
                           torch::ScalarType type,
                           const WeightCopiesOptions& how) {
  const bool half = type == torch::kBFloat16 || type == torch::kHalf;
  TORCH_CHECK(half || type == torch::kFloat,
              "[WeightCopies] expected half or single precision, got ", type);
  const torch::NoGradGuard no_grad;
  std::unordered_set<const c10::TensorImpl*> seen, elsewhere;
  for (const Tensor& weight : how.used_elsewhere) {
    elsewhere.insert(weight.unsafeGetTensorImpl());
  }
  const auto take = [&](const std::vector<Tensor>& from) {
    for (const Tensor& weight : from) {
      if (weight.scalar_type() == torch::kFloat && weight.requires_grad() &&
          weight.dim() > 0 &&
          seen.insert(weight.unsafeGetTensorImpl()).second) {
        weights_.push_back(weight);
      }
    }
  };
  take(weights);
  const size_t copied = weights_.size();
  take(how.straight);
  if (weights_.empty()) return;
  const bool makes_copies = half && !how.each_use && copied > 0;
  // In one piece and in order: weights that lie together have copies that do.
  const auto options = weights_[0].options().dtype(type).requires_grad(false);
  if (makes_copies) {
    int64_t total = 0;
    for (size_t i = 0; i < copied; ++i) {
      total += c10::multiply_integers(padded_sizes(weights_[i]));
    }
    copies_.push_back(torch::zeros({total}, options));
  }
  const Tensor ones =
      weights_[0].is_cuda() ? torch::ones({1, kMostOnes}, options) : Tensor();
  std::unordered_map<const c10::TensorImpl*, WeightCopy> made;
  int64_t first = 0;
  for (size_t i = 0; i < weights_.size(); ++i) {
    const Tensor& weight = weights_[i];
    WeightCopy entry;
    entry.type = type;
    if (i < copied) {
      if (makes_copies) {
        const auto sizes = padded_sizes(weight);
        const int64_t count = c10::multiply_integers(sizes);
        entry.padded = copies_[0].narrow(0, first, count).view(sizes);
        entry.copy = entry.padded.narrow(0, 0, weight.size(0));
        views_.push_back(entry.copy);
        sources_.push_back(weight);
        first += count;
      } else if (!half) {
        entry.padded = entry.copy = weight.detach();
      } else {
        entry.each_use = true;
      }
    }
    entry.ones = ones;
    entry.alone = !elsewhere.contains(weight.unsafeGetTensorImpl());
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
  if (!views_.empty()) compat::copy_list(views_, sources_);
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
  const auto known = known_of(weight);
  if (!is_fresh(known, weight) || known->type != type) return {};
  if (!known->each_use) return padded ? known->padded : known->copy;
  const torch::NoGradGuard no_grad;
  if (!padded) return weight.detach().to(type);
  const Tensor copy =
      torch::zeros(padded_sizes(weight), weight.detach().options().dtype(type));
  copy.narrow(0, 0, weight.size(0)).copy_(weight);
  return copy;
}

bool WeightCopies::has(const Tensor& weight) {
  return is_fresh(known_of(weight), weight);
}

bool WeightCopies::each_use(const Tensor& weight, torch::ScalarType type) {
  const auto known = known_of(weight);
  return is_fresh(known, weight) && known->each_use && known->type == type;
}

bool WeightCopies::alone(const Tensor& weight) {
  const auto known = known_of(weight);
  return known && known->alone;
}

Tensor WeightCopies::ones(const Tensor& weight, int64_t count) {
  const auto known = known_of(weight);
  if (!known || count > kMostOnes || !known->ones.defined()) return {};
  return known->ones.narrow(1, 0, count);
}

}  // namespace reprise
