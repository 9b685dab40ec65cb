#include "recompute/boundary.h"

#include "recompute/stage_checks.h"

#include <c10/util/Exception.h>

#include <sstream>
#include <utility>

namespace reprise::detail {

Boundary::Boundary(Tensors list, std::vector<bool> needs_grad)
    : tensors(std::move(list)), requires_grad(std::move(needs_grad)) {
  for (const auto& tensor : tensors) versions.push_back(version_of(tensor));
}

void Boundary::check_unchanged(const std::string& stage,
                               const char* what) const {
  for (size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK(version_of(tensors[i]) == versions[i], "[Execution] input ", i,
                " of stage '", stage, "' was ", what);
  }
}

TensorShape::TensorShape(const torch::Tensor& tensor) {
  if (!tensor.defined()) return;
  sizes = tensor.sizes().vec();
  options = tensor.options().requires_grad(false);
}

bool TensorShape::operator==(const TensorShape& other) const {
  if (options.has_value() != other.options.has_value()) return false;
  return !options ||
         (sizes == other.sizes && options->dtype() == other.options->dtype() &&
          options->device() == other.options->device());
}

namespace {

std::string describe(const std::vector<TensorShape>& shapes) {
  std::ostringstream text;
  for (const auto& shape : shapes) {
    if (text.tellp() > 0) text << "; ";
    if (!shape.options) {
      text << "undefined";
      continue;
    }
    text << shape.options->dtype() << ' ' << c10::IntArrayRef(shape.sizes)
         << " on " << shape.options->device();
  }
  return text.str();
}

}  // namespace

void check_same_shapes(const std::string& stage,
                       const std::vector<TensorShape>& before,
                       const std::vector<TensorShape>& returned) {
  TORCH_CHECK(
      returned == before, "[Execution] expected stage '", stage,
      "' to return tensors of the same types and shapes when recomputed (",
      describe(before), "), got (", describe(returned),
      "); a stage may depend on its inputs, parameters, buffers and "
      "random numbers only");
}

std::vector<bool> which_require_grad(const Tensors& tensors) {
  std::vector<bool> which;
  for (const auto& tensor : tensors) {
    which.push_back(tensor.defined() && tensor.requires_grad());
  }
  return which;
}

Tensors detach_all(const Tensors& tensors) {
  Tensors detached;
  for (const auto& tensor : tensors) {
    detached.push_back(tensor.defined() ? tensor.detach() : tensor);
  }
  return detached;
}

int64_t bytes_of(const Tensors& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) {
    if (tensor.defined()) bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

}  // namespace reprise::detail
