#pragma once

#include <reprise/recompute/chain.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

/// Checks of what stages take and return. `origin` is the name in brackets that
/// begins each message. Tested by tests/recompute/execution_errors_test.cpp.
namespace reprise::detail {

/// Returns "stage 2 'name'".
std::string stage_text(const Chain& chain, int stage);

/// Throws c10::Error unless `stage` takes `count` tensors, which the stage
/// before it returned.
void check_input_count(const char* origin, const Chain& chain, int stage,
                       size_t count);

/// Throws c10::Error unless `stage` returned at least one defined tensor.
void check_outputs(const char* origin, const Chain& chain, int stage,
                   const Tensors& outputs);

/// Throws c10::Error if there is a gradient of an output of the chain that is not defined.
void check_gradients(const char* origin, const Chain& chain,
                     const Tensors& gradients,
                     const std::vector<bool>& output_defined);

/// Returns the version of a tensor, which changes if it is modified in place;
/// 0 for tensors that have none.
int64_t version_of(const torch::Tensor& tensor);

}  // namespace reprise::detail
