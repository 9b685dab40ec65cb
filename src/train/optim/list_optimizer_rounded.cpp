// ListOptimizer: parameters in bfloat16 that are updated in float32 and rounded.
// Tested by tests/train/step/half_parameters_training_test.cpp.
#include "base/splitmix.h"
#include "ops/stochastic_add.h"
#include "train/optim/list_optimizer.h"

#include <algorithm>
#include <utility>

namespace reprise {
namespace {

// Bound for the size of a list in bfloat16. It needs a copy in float32 and temporaries of the
// same size.
constexpr size_t kRoundedChunkBytes = size_t{1} << 20;

}  // namespace

bool ListOptimizer::is_rounded(const torch::Tensor& parameter) const {
  return rounds_ && parameter.scalar_type() == torch::kBFloat16;
}

std::vector<ListOptimizer::RoundedList> ListOptimizer::rounded_lists(
    const std::vector<Entry*>& entries) const {
  std::vector<RoundedList> result;
  int64_t most = 0;
  for (List& list : lists_of(entries, kRoundedChunkBytes)) {
    RoundedList rounded;
    rounded.parameters = list.parameters;
    int64_t count = 0;
    for (size_t i = 0; i < list.parameters.size(); ++i) {
      const torch::Tensor& p = list.parameters[i];
      const size_t place = places_.at(p.unsafeGetTensorImpl());
      rounded.seeds.push_back(detail::splitmix(
          detail::splitmix(static_cast<uint64_t>(list.counts[i]), 0), place));
      count += p.numel();
      torch::Tensor& gradient = list.gradients[i];
      if (gradient.scalar_type() != torch::kFloat ||
          gradient.strides() != p.strides()) {
        gradient = torch::empty_strided(p.sizes(), p.strides(),
                                        p.options().dtype(torch::kFloat))
                       .copy_(gradient);
      }
    }
    most = std::max(most, count);
    rounded.list = std::move(list);
    result.push_back(std::move(rounded));
  }
  if (result.empty()) return result;
  // One list at a time has its copies there.
  const torch::Tensor copies = torch::empty(
      {most}, entries[0]->parameter.options().dtype(torch::kFloat));
  std::vector<List> lists;
  for (RoundedList& rounded : result) {
    int64_t first = 0;
    for (torch::Tensor& p : rounded.list.parameters) {
      const auto values = copies.narrow(0, first, p.numel());
      first += p.numel();
      p = values.as_strided(p.sizes(), p.strides(), values.storage_offset());
    }
    lists.push_back(rounded.list);
  }
  reserve(lists);
  return result;
}

void ListOptimizer::update_rounded(const RoundedList& rounded, double lr) {
  const Tensors& copies = rounded.list.parameters;
  for (size_t i = 0; i < copies.size(); ++i) {
    copies[i].copy_(rounded.parameters[i]);
  }
  update(rounded.list, lr);
  for (size_t i = 0; i < copies.size(); ++i) {
    torch::Tensor parameter = rounded.parameters[i];
    parameter.zero_();
    detail::add_stochastically(parameter, copies[i], rounded.seeds[i]);
  }
}

}  // namespace reprise
