#include "recompute/stage_checks.h"

#include <fmt/format.h>

#include <algorithm>

namespace reprise::detail {

std::string stage_text(const Chain& chain, int stage) {
  return fmt::format("stage {} '{}'", stage, chain[stage].name());
}

void check_input_count(const char* origin, const Chain& chain, int stage,
                       size_t count) {
  const int takes = chain[stage].takes();
  if (takes == 0 || static_cast<size_t>(takes) == count) return;
  TORCH_CHECK(
      false, "[", origin, "] expected ", takes, " tensor",
      takes == 1 ? "" : "s", " for ", stage_text(chain, stage), ", got ", count,
      stage == 0 ? std::string(" as inputs of the chain")
                 : " from " + stage_text(chain, stage - 1),
      static_cast<size_t>(takes) < count
          ? "; Stage::on_first() passes additional tensors through"
          : "; a stage must return or pass through all tensors that later "
            "stages take");
}

void check_outputs(const char* origin, const Chain& chain, int stage,
                   const Tensors& outputs) {
  TORCH_CHECK(!outputs.empty(), "[", origin, "] expected ",
              stage_text(chain, stage),
              " to return at least one tensor, got none");
  TORCH_CHECK(std::any_of(outputs.begin(), outputs.end(),
                          [](const auto& tensor) { return tensor.defined(); }),
              "[", origin, "] expected ", stage_text(chain, stage),
              " to return a tensor, got ", outputs.size(), " undefined; ",
              "assign what it returns on every path");
}

void check_gradients(const char* origin, const Chain& chain,
                     const Tensors& gradients,
                     const std::vector<bool>& output_defined) {
  for (size_t i = 0; i < gradients.size(); ++i) {
    TORCH_CHECK(!gradients[i].defined() || output_defined[i], "[", origin,
                "] expected no gradient for output ", i,
                " of the chain, since ", stage_text(chain, chain.size() - 1),
                " returned it undefined, got one");
  }
}

int64_t version_of(const torch::Tensor& tensor) {
  // Inference tensors have no version counter.
  return tensor.defined() && !tensor.is_inference() ? tensor._version() : 0;
}

}  // namespace reprise::detail
