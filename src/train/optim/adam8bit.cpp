#include "compat/foreach.h"
#include "train/optim/chunks.h"
#include "train/optim/dynamic_quantization.h"
#include "train/optim/list_optimizer.h"
#include "train/optim/registry.h"

#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <set>

namespace reprise {
namespace {

constexpr int64_t kBlock = 256;
// Smaller parameters are not quantized: they save few bytes, and include biases
// and norms, which are most sensitive to errors.
constexpr int64_t kFewest = 4096;

/// Returns the number of values per chunk, each with 17 bytes of buffers. On
/// CUDA a chunk fills the device but fits in the L2 cache of large devices; on
/// the CPU it fits in the cache of a core.
int64_t chunk_values(torch::Device device) {
  return device.is_cuda() ? int64_t{3} << 19 : int64_t{1} << 18;
}

int64_t blocks_in(int64_t values) {
  return (values + kBlock - 1) / kBlock;
}

/// Adam with 8-bit moments. The moments of a chunk are dequantized into
/// buffers, updated and quantized again, so that an update uses its moments
/// before they are rounded.
///
/// The code 0 is not used for the second moment; values nearest to it get the
/// smallest positive code. If a second moment were rounded to 0 and the next
/// gradient were also near 0, only eps would remain as divisor, and the
/// parameter would jump by a thousand learning rates. A step that is too small
/// is harmless.
class Adam8bit final : public ListOptimizer {
 public:
  Adam8bit(const OptimizerOptions& options, const NamedTensors& parameters,
           bool decoupled)
      : ListOptimizer(parameters, {"exp_avg", "exp_avg_sq", "exp_avg_max",
                                   "exp_avg_sq_max"}),
        options_(options),
        decoupled_(decoupled) {
    std::set<std::string> names(options.unquantized.begin(),
                                options.unquantized.end());
    for (const auto& [name, parameter] : parameters) {
      if (names.erase(name) == 0) continue;
      unquantized_.insert(parameter.unsafeGetTensorImpl());
    }
    TORCH_CHECK(names.empty(), "[make_optimizer] expected names of parameters ",
                "as unquantized, got '", *names.begin(), "'");
  }

  Tensors held() const override {
    Tensors held = ListOptimizer::held();
    for (const auto& item : codes_) {
      for (const Code& code : item.second) {
        held.insert(held.end(), {code.values, code.first, code.above});
      }
    }
    return held;
  }

 protected:
  // Kinds of state: the two moments, then the block maxima of each.
  enum Kind : size_t { kFirst, kSecond, kMaxima };

  std::optional<std::vector<int64_t>> shape_of(
      size_t kind, const torch::Tensor& parameter) const override {
    if (kind < kMaxima) return parameter.sizes().vec();
    if (!quantized(parameter)) return std::nullopt;
    return std::vector<int64_t>{blocks_in(parameter.numel())};
  }

  torch::ScalarType type_of(size_t kind,
                            const torch::Tensor& parameter) const override {
    if (!quantized(parameter)) return parameter.scalar_type();
    return kind < kMaxima ? torch::kByte : torch::kFloat;
  }

  Temporaries temporaries() const override { return Temporaries::kWorkspace; }

  Tensors make_workspace(const List& list) override {
    const int64_t coded = longest(chunks_of(list, true));
    const int64_t most = std::max(coded, longest(chunks_of(list, false)));
    const auto device = list.parameters[0].device();
    Tensors buffers = {torch::empty({most}, list.parameters[0].options())};
    if (coded == 0) return buffers;
    const auto options = torch::dtype(torch::kFloat).device(device);
    buffers.push_back(torch::empty({coded}, options));
    buffers.push_back(torch::empty({coded}, options.dtype(torch::kByte)));
    for (const Code& code : codes_on(device)) {
      buffers.push_back(torch::empty({coded}, options));
      buffers.push_back(torch::empty({blocks_in(coded)}, options));
      buffers.insert(buffers.end(), {code.values, code.first, code.above});
    }
    return buffers;
  }

  void update(const List& list, double lr) override {
    for (const Chunk& chunk : chunks_of(list, true)) {
      const Buffers buffers(list.workspace, chunk.values);
      read(list, chunk, buffers, kFirst);
      read(list, chunk, buffers, kSecond);
      update(views_of(list, chunk, &buffers), lr);
      write(list, chunk, buffers, kFirst);
      write(list, chunk, buffers, kSecond);
    }
    for (const Chunk& chunk : chunks_of(list, false)) {
      update(views_of(list, chunk, nullptr), lr);
    }
  }

 private:
  struct Code {
    torch::Tensor values;        // value of each code
    torch::Tensor first, above;  // tables of NearestCode
  };
  using Codes = std::array<Code, 2>;  // by moment

  /// Part of the workspace that a chunk uses.
  struct Buffers {
    Buffers(const Tensors& all, int64_t count)
        : spare(all[0].narrow(0, 0, count)),
          indices(spare.view(torch::kInt)),
          limits(all[1].narrow(0, 0, count)),
          bytes(all[2].narrow(0, 0, count)) {
      for (const size_t moment : {kFirst, kSecond}) {
        const torch::Tensor* own = &all[3 + 5 * moment];
        values[moment] = own[0].narrow(0, 0, count);
        maxima[moment] = own[1].narrow(0, 0, blocks_in(count));
        codes[moment] = {own[2], own[3], own[4]};
      }
    }
    torch::Tensor spare;
    torch::Tensor indices;  // shares the memory of `spare`
    torch::Tensor limits;
    torch::Tensor bytes;
    std::array<torch::Tensor, 2> values, maxima;  // by moment
    Codes codes;
  };

  /// Parallel lists of views of a chunk.
  struct Views {
    Tensors parameters, gradients, first, second, spare;
    std::vector<int64_t> counts;
  };

  bool quantized(const torch::Tensor& parameter) const {
    return parameter.scalar_type() == torch::kFloat &&
           parameter.numel() >= kFewest &&
           unquantized_.count(parameter.unsafeGetTensorImpl()) == 0;
  }

  std::vector<Chunk> chunks_of(const List& list, bool coded) const {
    std::vector<int64_t> sizes;
    for (const auto& p : list.parameters) {
      sizes.push_back(quantized(p) == coded ? p.numel() : 0);
    }
    return divide(sizes, kBlock, chunk_values(list.parameters[0].device()));
  }

  /// Returns the codes on `device`. They are copied once, because a copy
  /// synchronizes with the device.
  const Codes& codes_on(torch::Device device) {
    const auto found = codes_.find(device.str());
    if (found != codes_.end()) return found->second;
    const auto code = [&](bool with_sign) {
      const auto values = dynamic_code(with_sign);
      const auto nearest = nearest_code(values, /*skip_zero=*/!with_sign);
      const auto tensor = [&](const auto& list, torch::ScalarType type) {
        return torch::tensor(at::makeArrayRef(list.data(), list.size()), type)
            .to(device);
      };
      return Code{tensor(values, torch::kFloat),
                  tensor(nearest.first, torch::kByte),
                  tensor(nearest.above, torch::kFloat)};
    };
    return codes_.emplace(device.str(), Codes{code(true), code(false)})
        .first->second;
  }

  /// Views of a moment's bytes and maxima in the state and in `buffers`, for
  /// copies between them.
  struct Places {
    Tensors own, buffered;
  };
  static Places places(const List& list, const Chunk& chunk,
                       const Buffers& buffers, size_t moment, bool maxima) {
    const int64_t unit = maxima ? kBlock : 1;
    const Tensors& state = list.state[maxima ? kMaxima + moment : moment];
    const torch::Tensor& buffer =
        maxima ? buffers.maxima[moment] : buffers.bytes;
    Places result;
    for (const Piece& piece : chunk.pieces) {
      const int64_t count = maxima ? blocks_in(piece.count) : piece.count;
      result.own.push_back(
          state[piece.at].view(-1).narrow(0, piece.begin / unit, count));
      result.buffered.push_back(buffer.narrow(0, piece.place / unit, count));
    }
    return result;
  }

  static void read(const List& list, const Chunk& chunk, const Buffers& buffers,
                   size_t moment) {
    const torch::Tensor& values = buffers.values[moment];
    for (const bool maxima : {false, true}) {
      const auto [own, buffered] = places(list, chunk, buffers, moment, maxima);
      compat::copy_list(buffered, own);
    }
    torch::Tensor indices = buffers.indices;
    indices.copy_(buffers.bytes);
    torch::Tensor out = values;
    at::index_select_out(out, buffers.codes[moment].values, 0, indices);
    values.view({-1, kBlock}).mul_(buffers.maxima[moment].unsqueeze(1));
    // Unused values of a last block must not contribute to its maximum.
    for (const Piece& piece : chunk.pieces) {
      const int64_t rest = blocks_in(piece.count) * kBlock - piece.count;
      if (rest > 0) values.narrow(0, piece.place + piece.count, rest).zero_();
    }
  }

  static void write(const List& list, const Chunk& chunk,
                    const Buffers& buffers, size_t moment) {
    const torch::Tensor& values = buffers.values[moment];
    torch::Tensor maxima = buffers.maxima[moment];
    torch::Tensor magnitudes = buffers.spare;
    at::abs_out(magnitudes, values);
    at::amax_out(maxima, magnitudes.view({-1, kBlock}), 1);
    {
      const auto [own, buffered] = places(list, chunk, buffers, moment, true);
      compat::copy_list(own, buffered);
    }
    // Avoid 0 / 0. A block of zeros stays zero with any code.
    maxima.clamp_min_(std::numeric_limits<float>::min());
    values.view({-1, kBlock}).div_(maxima.unsqueeze(1));
    encode(buffers, moment);
    const auto [own, buffered] = places(list, chunk, buffers, moment, false);
    compat::copy_list(own, buffered);
  }

  /// Writes the codes nearest to the values. Overwrites the values.
  static void encode(const Buffers& buffers, size_t moment) {
    const Code& code = buffers.codes[moment];
    torch::Tensor values = buffers.values[moment];
    torch::Tensor indices = buffers.indices;
    torch::Tensor limits = buffers.limits;
    torch::Tensor bytes = buffers.bytes;
    at::bitwise_right_shift_out(indices, values.view(torch::kInt),
                                NearestCode::kCellShift);
    indices.add_(NearestCode::kCells / 2);
    at::index_select_out(bytes, code.first, 0, indices);
    indices.copy_(bytes);
    at::index_select_out(limits, code.above, 0, indices);
    // Convert to float first, because adding two types needs a temporary.
    torch::Tensor codes = buffers.spare;
    codes.copy_(bytes);
    values.gt_(limits).add_(codes);  // plus 1 above the midpoint
    bytes.copy_(values);
  }

  /// Returns views of a chunk, with the moments in `buffers`, or in the state
  /// of the list if it is null.
  static Views views_of(const List& list, const Chunk& chunk,
                        const Buffers* buffers) {
    Views views;
    for (const Piece& piece : chunk.pieces) {
      Tensors tensors = {list.parameters[piece.at], list.gradients[piece.at]};
      if (buffers == nullptr) {
        tensors.push_back(list.state[kFirst][piece.at]);
        tensors.push_back(list.state[kSecond][piece.at]);
      }
      for_range(
          tensors, piece.begin, piece.count,
          [&](const Tensors& parts, int64_t done) {
            const auto in = [&](const torch::Tensor& buffer) {
              return buffer.narrow(0, piece.place + done, parts[0].numel())
                  .view(parts[0].sizes());
            };
            views.parameters.push_back(parts[0]);
            views.gradients.push_back(parts[1]);
            views.first.push_back(buffers ? in(buffers->values[0]) : parts[2]);
            views.second.push_back(buffers ? in(buffers->values[1]) : parts[3]);
            views.spare.push_back(in(list.workspace[0]));
            views.counts.push_back(list.counts[piece.at]);
          });
    }
    return views;
  }

  /// Runs the update of Adam with its temporaries in `spare`.
  void update(const Views& views, double lr) const {
    const auto& [p, gradients, first, second, spare, counts] = views;
    const double decay = options_.weight_decay;
    Tensors g = gradients;
    if (decay > 0 && decoupled_) at::_foreach_mul_(p, 1 - lr * decay);
    if (decay > 0 && !decoupled_) {
      at::_foreach_zero_(spare);
      at::_foreach_add_(spare, gradients);
      at::_foreach_add_(spare, p, decay);
      g = spare;
    }
    at::_foreach_mul_(first, options_.beta1);
    at::_foreach_add_(first, g, 1 - options_.beta1);
    at::_foreach_mul_(second, options_.beta2);
    at::_foreach_addcmul_(second, g, g, 1 - options_.beta2);

    std::vector<at::Scalar> rates;
    std::vector<at::Scalar> roots;
    for (const int64_t count : counts) {
      rates.emplace_back(-lr / (1 - std::pow(options_.beta1, count)));
      roots.emplace_back(std::sqrt(1 - std::pow(options_.beta2, count)));
    }
    at::_foreach_zero_(spare);
    at::_foreach_add_(spare, second);
    at::_foreach_sqrt_(spare);
    at::_foreach_div_(spare, roots);
    at::_foreach_add_(spare, options_.eps);
    at::_foreach_addcdiv_(p, first, spare, rates);
  }

  const OptimizerOptions options_;
  const bool decoupled_;
  std::set<const c10::TensorImpl*> unquantized_;
  std::map<std::string, Codes> codes_;  // by device
};

template <bool kDecoupled>
detail::OptimizerInfo make_adam8bit_info(const char* name) {
  detail::OptimizerInfo info;
  info.name = name;
  info.make = [](const OptimizerOptions& options,
                 const NamedTensors& parameters) -> std::unique_ptr<Optimizer> {
    return std::make_unique<Adam8bit>(options, parameters, kDecoupled);
  };
  info.has_betas = true;
  info.quantized = true;
  return info;
}

}  // namespace

namespace detail {

std::vector<OptimizerInfo> adam8bit_optimizers() {
  return {make_adam8bit_info<false>("adam8bit"),
          make_adam8bit_info<true>("adamw8bit")};
}

}  // namespace detail
}  // namespace reprise
