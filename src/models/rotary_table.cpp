#include "models/rotary_table.h"

#include "compat/autocast.h"

#include <c10/util/Exception.h>

#include <numbers>

namespace reprise::detail {

using torch::Tensor;

namespace {

Tensor scale_frequencies(const Tensor& frequencies,
                         const RopeScaling& scaling) {
  const auto positions = static_cast<double>(scaling.original_positions);
  const double longest = positions / scaling.low_freq_factor;
  const double shortest = positions / scaling.high_freq_factor;
  const Tensor wavelengths = 2 * std::numbers::pi / frequencies;
  const Tensor smooth = (positions / wavelengths - scaling.low_freq_factor) /
                        (scaling.high_freq_factor - scaling.low_freq_factor);
  const Tensor between =
      (1 - smooth) * frequencies / scaling.factor + smooth * frequencies;
  return torch::where(wavelengths < shortest, frequencies,
                      torch::where(wavelengths > longest,
                                   frequencies / scaling.factor, between));
}

}  // namespace

Tensor rotary_frequencies(const RotaryOptions& options) {
  TORCH_CHECK(options.head_dim > 0 && options.head_dim % 2 == 0,
              "[rotary_frequencies] expected an even number of channels per "
              "head, got ",
              options.head_dim);
  const torch::NoGradGuard no_grad;
  const Tensor exponents =
      torch::arange(0, options.head_dim, 2, torch::kLong).to(torch::kFloat) /
      static_cast<double>(options.head_dim);
  const Tensor frequencies = 1.0 / torch::pow(options.theta, exponents);
  return options.scaling ? scale_frequencies(frequencies, *options.scaling)
                         : frequencies;
}

std::pair<Tensor, Tensor> RotaryTable::get(const torch::Device& device,
                                           int64_t length) {
  TORCH_CHECK(length <= options_.positions, "[RotaryTable] expected at most ",
              options_.positions, " positions, got ", length);
  const std::lock_guard lock(mutex_);
  auto& tables = tables_[{device.type(), device.index()}];
  if (!tables.first.defined()) {
    const torch::NoGradGuard no_grad;
    const compat::AutocastGuard no_autocast(compat::AutocastState{});
    const auto options = torch::TensorOptions(device).dtype(torch::kFloat);
    const Tensor angles =
        torch::outer(torch::arange(options_.positions, options),
                     rotary_frequencies(options_).to(device));
    tables = {angles.cos(), angles.sin()};
  }
  return {tables.first.narrow(0, 0, length),
          tables.second.narrow(0, 0, length)};
}

std::pair<Tensor, Tensor> RotaryTable::at(const Tensor& positions) {
  const auto [cos, sin] = get(positions.device(), positions.size(1));
  const auto rows = [&](const Tensor& table) {
    return table.index_select(0, positions.flatten())
        .view({positions.size(0), 1, positions.size(1), table.size(1)});
  };
  return {rows(cos), rows(sin)};
}

}  // namespace reprise::detail
