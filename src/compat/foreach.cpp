#include "compat/foreach.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/version.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

// Exists since 2.1. The switch has a margin: the loop does the same.
#define REPRISE_HAS_FOREACH_COPY \
  (TORCH_VERSION_MAJOR > 2 ||    \
   (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 4))

namespace reprise::compat {

void copy_list(at::TensorList to, at::TensorList from) {
  const c10::NoGradGuard no_grad;
#if REPRISE_HAS_FOREACH_COPY
  // Grouped by type: LibTorch copies a list of mixed types one tensor at a time.
  std::map<at::ScalarType,
           std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>>
      lists;
  for (size_t i = 0; i < to.size(); ++i) {
    auto& [targets, sources] = lists[to[i].scalar_type()];
    targets.push_back(to[i]);
    sources.push_back(from[i]);
  }
  for (const auto& [type, list] : lists) {
    at::_foreach_copy_(list.first, list.second);
  }
#else
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
#endif
}

void add_list(at::TensorList sums, at::TensorList terms) {
  const c10::NoGradGuard no_grad;
  std::map<std::pair<std::string, at::ScalarType>,
           std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>>
      lists;
  for (size_t i = 0; i < sums.size(); ++i) {
    auto& list = lists[{sums[i].device().str(), sums[i].scalar_type()}];
    list.first.push_back(sums[i]);
    list.second.push_back(terms[i]);
  }
  for (const auto& item : lists) {
    at::_foreach_add_(item.second.first, item.second.second);
  }
}

void zero_list(at::TensorList tensors) {
  const c10::NoGradGuard no_grad;
  // Grouped by type and device: LibTorch handles mixed lists one tensor at a time.
  std::map<std::pair<std::string, at::ScalarType>, std::vector<at::Tensor>>
      lists;
  for (const auto& tensor : tensors) {
    lists[{tensor.device().str(), tensor.scalar_type()}].push_back(tensor);
  }
  for (const auto& item : lists) at::_foreach_zero_(item.second);
}

}  // namespace reprise::compat
