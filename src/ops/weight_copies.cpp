#include "compat/cuda_graph.h"
#include "compat/foreach.h"
#include "ops/split_weights.h"

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

// Tensor cores need sizes that are multiples of these.
constexpr int64_t kRowAlignment = 128;
constexpr int64_t kVectorAlignment = 8;

constexpr int64_t kMaxOnes = int64_t{1} << 16;

struct WeightCopy {
  Tensor padded,
      copy;  // undefined with convert_per_use and for embedding tables
  torch::ScalarType type = torch::kFloat;
  bool convert_per_use = false;
  bool own = false;    // the weight has half precision and is its own copy
  bool split = false;  // the copy is inside the weight
  bool asked = false;  // an operator has used it; weights of others stay whole
  bool is_split = false;   // at present; if not, the weight has its own values
  Tensor ones;             // undefined on the CPU
  bool single_use = true;  // no other operator adds to the gradient
  int64_t version = -1;    // of the weight when it was copied; -1: expired
  bool written = false;    // by an update since the last refresh()
};

/// Entries by weight, for all WeightCopies of the process. Operators are called with a
/// weight only, deep inside modules and recomputations, and have no other way to find its
/// copy. Read from any thread: those of the backward recompute forwards.
struct WeightRegistry {
  std::shared_mutex mutex;
  std::unordered_map<const c10::TensorImpl*, WeightCopy> entries;
};

WeightRegistry& weight_registry() {
  static WeightRegistry* all = new WeightRegistry;  // never destroyed
  return *all;
}

/// The entry of `weight`, if there is one, up to date or not.
std::optional<WeightCopy> find_entry(const Tensor& weight) {
  WeightRegistry& all = weight_registry();
  const std::shared_lock lock(all.mutex);
  const auto found = all.entries.find(weight.unsafeGetTensorImpl());
  if (found == all.entries.end()) return std::nullopt;
  return found->second;
}

void set_split(const Tensor& weight, bool is_split) {
  WeightRegistry& all = weight_registry();
  const std::unique_lock lock(all.mutex);
  WeightCopy& entry = all.entries.at(weight.unsafeGetTensorImpl());
  entry.is_split = is_split;
  if (!is_split) entry.version = -1;
}

bool is_current(const std::optional<WeightCopy>& entry, const Tensor& weight) {
  return entry && entry->version == weight._version();
}

/// Splits `weight`, which an operator reads for the first time, and returns its entry. Not
/// within a capture, whose every replay would split it again.
WeightCopy split_at_first_use(const Tensor& weight) {
  const torch::NoGradGuard no_grad;
  WeightRegistry& all = weight_registry();
  const std::unique_lock lock(all.mutex);
  WeightCopy& entry = all.entries.at(weight.unsafeGetTensorImpl());
  entry.asked = true;
  if (!entry.is_split && !compat::is_capturing()) {
    detail::split_weight(weight);
    entry.is_split = true;
    entry.version = weight._version();
  }
  return entry;
}

/// The values of a split weight, which stays split: operators have saved its copy.
Tensor merged_copy(const Tensor& weight, torch::ScalarType type) {
  const torch::NoGradGuard no_grad;
  const Tensor values = weight.detach().clone();
  detail::merge_weight(values);
  return values.to(type);
}

/// Makes sure that `weight`, which an operator reads in full precision and may save, is not
/// split later.
void keep_whole(const Tensor& weight) {
  WeightRegistry& all = weight_registry();
  const std::unique_lock lock(all.mutex);
  WeightCopy& entry = all.entries.at(weight.unsafeGetTensorImpl());
  entry.split = entry.asked = false;
  entry.padded = entry.copy = Tensor();
}

/// Shape of a copy with padding.
std::vector<int64_t> padded_sizes(const Tensor& weight) {
  auto sizes = weight.sizes().vec();
  const int64_t round = weight.dim() == 2 ? kRowAlignment : kVectorAlignment;
  sizes[0] = (sizes[0] + round - 1) / round * round;
  return sizes;
}

}  // namespace

WeightCopies::WeightCopies(const std::vector<Tensor>& weights,
                           torch::ScalarType type,
                           const WeightCopiesOptions& options) {
  const bool half = type == torch::kBFloat16 || type == torch::kHalf;
  TORCH_CHECK(half || type == torch::kFloat,
              "[WeightCopies] expected float16, bfloat16 or float32, got ",
              type);
  const torch::NoGradGuard no_grad;
  std::unordered_set<const c10::TensorImpl*> seen, shared;
  for (const Tensor& weight : options.shared_weights) {
    shared.insert(weight.unsafeGetTensorImpl());
  }
  const auto take = [&](const std::vector<Tensor>& from) {
    for (const Tensor& weight : from) {
      const bool is_half =
          options.half_weights && half && weight.scalar_type() == type;
      if ((weight.scalar_type() == torch::kFloat || is_half) &&
          weight.requires_grad() && weight.dim() > 0 &&
          seen.insert(weight.unsafeGetTensorImpl()).second) {
        weights_.push_back(weight);
      }
    }
  };
  take(weights);
  const size_t copied = weights_.size();
  take(options.embedding_tables);
  if (weights_.empty()) return;
  const bool makes_copies = half && !options.convert_per_use && copied > 0;
  const auto splits = [&](const Tensor& weight) {
    return options.split && makes_copies && type == torch::kBFloat16 &&
           detail::can_split(weight) &&
           !shared.contains(weight.unsafeGetTensorImpl());
  };
  const auto is_own = [&](const Tensor& weight) {
    return half && weight.scalar_type() == type;
  };
  // One allocation, in order: adjacent weights have adjacent copies.
  const auto copy_options =
      weights_[0].options().dtype(type).requires_grad(false);
  if (makes_copies) {
    int64_t total = 0;
    for (size_t i = 0; i < copied; ++i) {
      if (splits(weights_[i]) || is_own(weights_[i])) continue;
      total += c10::multiply_integers(padded_sizes(weights_[i]));
    }
    copies_.push_back(torch::zeros({total}, copy_options));
  }
  const Tensor ones = weights_[0].is_cuda()
                          ? torch::ones({1, kMaxOnes}, copy_options)
                          : Tensor();
  std::unordered_map<const c10::TensorImpl*, WeightCopy> made;
  int64_t first = 0;
  for (size_t i = 0; i < weights_.size(); ++i) {
    const Tensor& weight = weights_[i];
    WeightCopy entry;
    entry.type = type;
    if (i < copied) {
      if (is_own(weight)) {
        entry.own = true;
        entry.copy = weight.detach();
        if (padded_sizes(weight) == weight.sizes()) entry.padded = entry.copy;
      } else if (splits(weight)) {
        entry.split = true;
        entry.copy = detail::upper_half(weight);
        if (weight.size(0) % kRowAlignment == 0) entry.padded = entry.copy;
        split_.push_back(weight);
      } else if (makes_copies) {
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
        entry.convert_per_use = true;
      }
    }
    entry.ones = ones;
    entry.single_use = !shared.contains(weight.unsafeGetTensorImpl());
    made.emplace(weight.unsafeGetTensorImpl(), std::move(entry));
  }
  {
    WeightRegistry& all = weight_registry();
    const std::unique_lock lock(all.mutex);
    for (const auto& [key, entry] : made) {
      TORCH_CHECK(
          !all.entries.contains(key),
          "[WeightCopies] another WeightCopies holds one of the weights");
    }
    all.entries.merge(made);
  }
  refresh();
}

WeightCopies::~WeightCopies() {
  try {
    restore(split_);
  } catch (const std::exception& error) {
    TORCH_WARN("[WeightCopies] the weights could not be restored: ",
               error.what());
  }
  WeightRegistry& all = weight_registry();
  const std::unique_lock lock(all.mutex);
  for (const Tensor& weight : weights_) {
    all.entries.erase(weight.unsafeGetTensorImpl());
  }
}

void WeightCopies::refresh() {
  const torch::NoGradGuard no_grad;
  std::vector<Tensor> to, from;
  for (size_t i = 0; i < views_.size(); ++i) {
    const auto entry = find_entry(sources_[i]);
    if (entry->written && is_current(entry, sources_[i])) continue;
    to.push_back(views_[i]);
    from.push_back(sources_[i]);
  }
  if (!to.empty()) compat::copy_list(to, from);
  for (const Tensor& weight : split_) {
    const auto entry = find_entry(weight);
    if (entry->is_split || !entry->asked) continue;
    detail::split_weight(weight);
    set_split(weight, true);
  }
  WeightRegistry& all = weight_registry();
  const std::unique_lock lock(all.mutex);
  for (const Tensor& weight : weights_) {
    WeightCopy& entry = all.entries.at(weight.unsafeGetTensorImpl());
    entry.version = weight._version();
    entry.written = false;
  }
}

void WeightCopies::restore(const std::vector<Tensor>& weights) {
  for (const Tensor& weight : weights) {
    if (!is_split(weight)) continue;
    detail::merge_weight(weight);
    set_split(weight, false);
  }
}

bool WeightCopies::is_split(const Tensor& weight) {
  const auto entry = find_entry(weight);
  return entry && entry->is_split;
}

void WeightCopies::expire() {
  restore(split_);
  expire_for_update();
}

void WeightCopies::expire_for_update() {
  WeightRegistry& all = weight_registry();
  const std::unique_lock lock(all.mutex);
  for (const Tensor& weight : weights_) {
    all.entries.at(weight.unsafeGetTensorImpl()).version = -1;
  }
}

Tensor WeightCopies::find(const Tensor& weight, torch::ScalarType type,
                          bool padded) {
  auto entry = find_entry(weight);
  if (!is_current(entry, weight)) return {};
  if (entry->type != type) {
    if (!entry->split) return {};
    if (entry->is_split) return merged_copy(weight, type);
    keep_whole(weight);
    return {};
  }
  if (entry->split && !entry->is_split) entry = split_at_first_use(weight);
  const bool usable = !entry->split || entry->is_split;
  const Tensor found = !usable  ? Tensor()
                       : padded ? entry->padded
                                : entry->copy;
  if (found.defined() ||
      !(entry->convert_per_use || entry->split || entry->own)) {
    return found;
  }
  const torch::NoGradGuard no_grad;
  if (!padded) return weight.detach().to(type);
  const Tensor copy =
      torch::zeros(padded_sizes(weight), weight.detach().options().dtype(type));
  copy.narrow(0, 0, weight.size(0))
      .copy_(entry->is_split ? entry->copy : weight.detach());
  return copy;
}

bool WeightCopies::has(const Tensor& weight) {
  return is_current(find_entry(weight), weight);
}

bool WeightCopies::converts_per_use(const Tensor& weight,
                                    torch::ScalarType type) {
  const auto entry = find_entry(weight);
  return is_current(entry, weight) && entry->convert_per_use &&
         entry->type == type;
}

bool WeightCopies::has_single_use(const Tensor& weight) {
  const auto entry = find_entry(weight);
  return entry && entry->single_use;
}

Tensor WeightCopies::memory_of(const Tensor& weight) {
  const auto entry = find_entry(weight);
  return entry && !entry->split && !entry->own ? entry->copy : Tensor();
}

void WeightCopies::mark_outdated(const std::vector<Tensor>& weights) {
  WeightRegistry& all = weight_registry();
  const std::unique_lock lock(all.mutex);
  for (const Tensor& weight : weights) {
    const auto found = all.entries.find(weight.unsafeGetTensorImpl());
    if (found != all.entries.end()) found->second.version = -1;
  }
}

void WeightCopies::mark_current(const std::vector<Tensor>& weights) {
  WeightRegistry& all = weight_registry();
  const std::unique_lock lock(all.mutex);
  for (const Tensor& weight : weights) {
    const auto found = all.entries.find(weight.unsafeGetTensorImpl());
    if (found == all.entries.end()) continue;
    found->second.version = weight._version();
    found->second.written = true;
  }
}

Tensor WeightCopies::ones(const Tensor& weight, int64_t count) {
  const auto entry = find_entry(weight);
  if (!entry || count > kMaxOnes || !entry->ones.defined()) return {};
  return entry->ones.narrow(1, 0, count);
}

}  // namespace reprise
