#include "compat/autocast.h"
#include "compat/gemm.h"
#include "ops/for_parts.h"
#include "ops/half_cross_entropy.h"

#include <reprise/ops/linear_cross_entropy.h>
#include <reprise/ops/weight_copies.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <algorithm>

namespace reprise {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kSumOfRows = at::Reduction::Sum;

// Tensor cores want rows of two-byte scores to begin at round addresses; a
// vocabulary of 50257 does not give them that.
constexpr int64_t kRoundColumns = 128;

constexpr int64_t kScoresAtATime = int64_t{1} << 22;
constexpr int64_t kScoresAtATimeOnCuda = int64_t{1} << 24;
// Where kernels need no copies of them. Each part passes over the whole weight and its
// gradient, so many rows are not cut into more than a few parts.
constexpr int64_t kScoresOfKernels = int64_t{1} << 26;
constexpr int64_t kPartsOfKernels = 8;

/// What a run needs besides the tensors, as numbers, since a graph keeps those.
struct ScoreSettings {
  int64_t chunk_scores;
  int64_t ignore_index;
  bool by_columns;
  torch::ScalarType product_type;  // autocast's, or that of the tensors
  torch::ScalarType loss_type;
  bool count_right;

  /// Whether HalfCrossEntropy has it.
  bool half_rows() const {
    return c10::elementSize(product_type) == 2 && !by_columns &&
           loss_type == torch::kFloat;
  }

  void put(AutogradContext& context) const {
    auto& data = context.saved_data;
    data["chunk_scores"] = chunk_scores;
    data["ignore_index"] = ignore_index;
    data["by_columns"] = by_columns;
    data["product_type"] = static_cast<int64_t>(product_type);
    data["loss_type"] = static_cast<int64_t>(loss_type);
  }
  static ScoreSettings get(AutogradContext& context) {
    auto& data = context.saved_data;
    const auto type = [&](const char* name) {
      return static_cast<torch::ScalarType>(data[name].toInt());
    };
    return {data["chunk_scores"].toInt(),
            data["ignore_index"].toInt(),
            data["by_columns"].toBool(),
            type("product_type"),
            type("loss_type"),
            false};
  }
};

/// The scores and what follows from them, some rows or columns at a time.
class Scores {
 public:
  /// `copy`: of the weight in the type of the products, with rows of zeros as
  /// WeightCopies has them; undefined: none.
  Scores(const Tensor& hidden, const Tensor& weight, const Tensor& copy,
         const Tensor& bias, const Tensor& targets,
         const ScoreSettings& settings)
      : settings_(settings),
        columns_(weight.size(0)),
        padding_(padding_of(columns_, settings.product_type)),
        hidden_(hidden.to(settings.product_type)),
        weight_(copy.defined() ? copy : with_padding(weight, 0)),
        bias_(bias.defined() ? with_padding(bias, 0) : bias),
        targets_(targets) {}

  const Tensor& hidden() const { return hidden_; }
  /// With rows of zeros at the end, as many as padded() adds columns.
  const Tensor& weight() const { return weight_; }
  int64_t rows() const { return hidden_.size(0); }
  int64_t columns() const { return columns_; }
  int64_t rows_at_a_time() const {
    return settings_.chunk_scores / std::max<int64_t>(columns(), 1);
  }
  int64_t columns_at_a_time() const {
    return settings_.chunk_scores / std::max<int64_t>(rows(), 1);
  }
  Tensor targets(int64_t first, int64_t count) const {
    return targets_.narrow(0, first, count);
  }
  Tensor ignored() const { return targets_.eq(settings_.ignore_index); }

  /// In the type of the products.
  Tensor of_rows(int64_t first, int64_t count) const {
    return product(hidden_.narrow(0, first, count), weight_, bias_)
        .narrow(1, 0, columns_);
  }
  /// A gradient of rows of scores in the type of the products, with columns of
  /// zeros at the end.
  Tensor padded(const Tensor& gradient) const {
    return with_padding(gradient, 1);
  }
  Tensor of_columns(int64_t first, int64_t count) const {
    return product(hidden_, weight_.narrow(0, first, count),
                   bias_.defined() ? bias_.narrow(0, first, count) : Tensor());
  }

 private:
  static int64_t padding_of(int64_t columns, torch::ScalarType type) {
    if (c10::elementSize(type) != 2) return 0;
    return (kRoundColumns - columns % kRoundColumns) % kRoundColumns;
  }

  Tensor with_padding(const Tensor& tensor, int64_t dim) const {
    if (padding_ == 0) return tensor.to(settings_.product_type);
    auto sizes = tensor.sizes().vec();
    sizes[static_cast<size_t>(dim)] = padding_ + columns_;
    const Tensor larger =
        torch::empty(sizes, tensor.options().dtype(settings_.product_type));
    larger.narrow(dim, 0, columns_).copy_(tensor);
    larger.narrow(dim, columns_, padding_).zero_();
    return larger;
  }

  static Tensor product(const Tensor& hidden, const Tensor& weight,
                        const Tensor& bias) {
    return bias.defined() ? torch::addmm(bias, hidden, weight.t())
                          : torch::mm(hidden, weight.t());
  }

  ScoreSettings settings_;
  int64_t columns_, padding_;
  Tensor hidden_, weight_, bias_, targets_;
};

LinearCrossEntropy forward_of(const Scores& scores,
                              const ScoreSettings& settings) {
  const auto type =
      scores.hidden().options().dtype(settings.loss_type).requires_grad(false);
  // Of the target's class, one column: the loss adds up as that of all columns.
  const Tensor picked = torch::empty({scores.rows(), 1}, type);
  const Tensor ignored = scores.ignored();
  LinearCrossEntropy result;
  if (settings.count_right) {
    result.right = torch::zeros({}, type.dtype(torch::kLong));
  }
  for_parts(scores.rows(), scores.rows_at_a_time(),
            [&](int64_t first, int64_t count) {
              Tensor values = scores.of_rows(first, count);
              const Tensor targets = scores.targets(first, count);
              if (settings.count_right) {
                result.right += values.argmax(1).eq(targets).sum();
              }
              values = values.to(settings.loss_type);
              values = torch::log_softmax(values, 1);
              const Tensor some =
                  targets.masked_fill(ignored.narrow(0, first, count), 0)
                      .unsqueeze(1);
              picked.narrow(0, first, count).copy_(values.gather(1, some));
            });
  const Tensor only = torch::zeros_like(ignored, torch::kLong)
                          .masked_fill_(ignored, settings.ignore_index);
  result.loss =
      torch::nll_loss(picked, only, {}, kSumOfRows, settings.ignore_index);
  return result;
}

/// What is to be had of the gradient, and the means to add it up.
class ScoreBackward {
 public:
  ScoreBackward(const Scores& scores, const ScoreSettings& settings,
                Tensor loss_gradient)
      : scores_(scores),
        settings_(settings),
        loss_gradient_(std::move(loss_gradient)) {}

  Tensor hidden, weight, bias;  // gradients; undefined: not wanted
  bool weight_is_new = false;   // nothing to add to yet

  void run() {
    const bool columns = settings_.by_columns && weight.defined();
    if (columns) {
      const auto type = loss_gradient_.options();
      largest_ = torch::empty({scores_.rows(), 1}, type);
      rest_ = torch::empty_like(largest_);
    }
    for_parts(scores_.rows(), scores_.rows_at_a_time(),
              [&](int64_t first, int64_t count) { add_rows(first, count); });
    if (!columns) return;
    prepare_columns();
    for_parts(scores_.columns(), scores_.columns_at_a_time(),
              [&](int64_t first, int64_t count) { add_columns(first, count); });
  }

 private:
  void add_rows(int64_t first, int64_t count) {
    const Tensor targets = scores_.targets(first, count);
    Tensor gradient = of_rows(first, count, targets);  // of the scores
    if (bias.defined()) bias.add_(gradient.sum(0));
    gradient = scores_.padded(gradient);
    if (hidden.defined()) {
      hidden.narrow(0, first, count)
          .copy_(torch::mm(gradient, scores_.weight()));
    }
    if (!weight.defined() || settings_.by_columns) return;
    const Tensor by_class = gradient.narrow(1, 0, scores_.columns()).t();
    const Tensor rows = scores_.hidden().narrow(0, first, count);
    if (first == 0 && weight_is_new &&
        weight.scalar_type() == rows.scalar_type()) {
      // To some libraries a product added to zeros is another one, in its last bits.
      torch::mm_out(weight, by_class, rows);
    } else {
      compat::add_product(weight, by_class, rows);
    }
  }

  Tensor of_rows(int64_t first, int64_t count, const Tensor& targets) {
    Tensor values = scores_.of_rows(first, count).to(settings_.loss_type);
    if (largest_.defined()) {
      largest_.narrow(0, first, count).copy_(values.amax(1, true));
    }
    values = torch::log_softmax(values, 1);
    if (largest_.defined()) {
      // The largest of the differences from the largest is 0.
      rest_.narrow(0, first, count).copy_(values.amax(1, true).neg_());
    }
    const Tensor total = torch::zeros({}, values.options());
    const Tensor gradient =
        torch::nll_loss_backward(loss_gradient_, values, targets, {},
                                 kSumOfRows, settings_.ignore_index, total);
    return torch::_log_softmax_backward_data(gradient, values, 1,
                                             settings_.loss_type);
  }

  void prepare_columns() {
    const Tensor ignored = scores_.ignored().unsqueeze(1);
    targets_ = scores_.targets(0, scores_.rows())
                   .unsqueeze(1)
                   .masked_fill(ignored, -1);
    at_target_ = loss_gradient_.neg()
                     .expand({scores_.rows(), 1})
                     .masked_fill(ignored, 0);
  }

  /// By the operator that rows go through, of the same values: libraries have more than
  /// one exponential. To it a row is the columns here and one more, for a target that
  /// is elsewhere.
  void add_columns(int64_t first, int64_t count) {
    Tensor values;  // logarithms of the softmax
    {
      const Tensor scores =
          scores_.of_columns(first, count).to(settings_.loss_type);
      values = torch::empty({scores_.rows(), count + 1}, scores.options());
      Tensor here = values.narrow(1, 0, count);
      torch::sub_out(here, scores, largest_);
      here.sub_(rest_);
      values.select(1, count).zero_();
    }
    const Tensor elsewhere =
        targets_.lt(first).logical_or_(targets_.ge(first + count));
    const Tensor place = (targets_ - first).masked_fill_(elsewhere, count);
    Tensor gradient = torch::zeros_like(values).scatter_(1, place, at_target_);
    gradient = torch::_log_softmax_backward_data(gradient, values, 1,
                                                 settings_.loss_type);
    values.reset();
    gradient =
        gradient.narrow(1, 0, count).to(settings_.product_type).contiguous();
    weight.narrow(0, first, count)
        .copy_(torch::mm(gradient.t(), scores_.hidden()));
  }

  const Scores& scores_;
  ScoreSettings settings_;
  Tensor loss_gradient_;
  // By row, for columns: the largest score, the logarithm of the sum of the
  // exponentials of the differences from it, the target and the loss's gradient there.
  Tensor largest_, rest_;
  Tensor targets_, at_target_;
};

HalfCrossEntropy half_of(const Tensor& hidden, const Tensor& weight,
                         const Tensor& copy, const Tensor& bias,
                         const Tensor& targets, const ScoreSettings& settings) {
  const Scores padded(hidden, weight, copy, {}, targets, settings);
  HalfCrossEntropy half;
  half.hidden = padded.hidden();
  half.weight = padded.weight();
  half.columns = weight.size(0);
  // Kernels do not read the scores that are no classes.
  if (bias.defined() || !HalfCrossEntropy::has_kernels(hidden)) {
    half.bias = HalfCrossEntropy::padded_bias(
        bias, half.columns, half.weight.size(0), half.weight.options());
  }
  half.targets = targets.contiguous();
  half.ignore_index = settings.ignore_index;
  half.rows_at_a_time = padded.rows_at_a_time();
  return half;
}

/// Nothing, as an argument of the operator: those are all defined.
Tensor defined_or_empty(const Tensor& tensor, const Tensor& hidden) {
  return tensor.defined() ? tensor : hidden.detach().new_empty({0});
}
Tensor undefined_if_empty(const Tensor& some) {
  return some.numel() == 0 ? Tensor() : some;
}

class CrossEntropyOperator
    : public torch::autograd::Function<CrossEntropyOperator> {
 public:
  static variable_list forward(AutogradContext* context, const Tensor& hidden,
                               const Tensor& weight, const Tensor& bias,
                               const Tensor& targets, const Tensor& copy,
                               const ScoreSettings& settings) {
    const compat::AutocastGuard none(compat::AutocastState{});
    settings.put(*context);
    if (copy.numel() > 0) {
      // As in lean_linear().
      if (!WeightCopies::each_use(weight, settings.product_type)) {
        context->saved_data["copy"] = copy;
      }
      context->saved_data["weight"] = weight;
    }
    LinearCrossEntropy result;
    if (settings.half_rows()) {
      const auto half = half_of(hidden, weight, undefined_if_empty(copy),
                                undefined_if_empty(bias), targets, settings);
      const auto [loss, right, left] = half.forward(settings.count_right);
      context->save_for_backward({hidden, weight, bias, targets, left.picked,
                                  defined_or_empty(left.log_total, hidden)});
      if (left.scores.defined()) context->saved_data["scores"] = left.scores;
      result = {loss, right};
    } else {
      context->save_for_backward({hidden, weight, bias, targets});
      result = forward_of(Scores(hidden, weight, undefined_if_empty(copy),
                                 undefined_if_empty(bias), targets, settings),
                          settings);
    }
    if (!settings.count_right) return {result.loss};
    context->mark_non_differentiable({result.right});
    return {result.loss, result.right};
  }

  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    TORCH_CHECK(!torch::GradMode::is_enabled(),
                "[linear_cross_entropy] has no second derivative; use "
                "torch::nn::functional::cross_entropy");
    const compat::AutocastGuard none(compat::AutocastState{});
    const auto saved = context->get_saved_variables();
    const Tensor &hidden = saved[0], &weight = saved[1];
    const Tensor bias = undefined_if_empty(saved[2]);
    const ScoreSettings settings = ScoreSettings::get(*context);
    auto& data = context->saved_data;
    const bool has_copy = data.count("weight") > 0;
    Tensor copy;
    if (data.count("copy") > 0) {
      copy = data["copy"].toTensor();
    } else if (has_copy) {
      copy = WeightCopies::find(data["weight"].toTensor(),
                                settings.product_type, /*padded=*/true);
    }
    const bool straight = has_copy && !settings.by_columns;
    HalfCrossEntropy::Gradients sums;
    if (context->needs_input_grad(0)) sums.hidden = torch::empty_like(hidden);
    if (context->needs_input_grad(1)) {
      sums.weight_sum =
          straight ? gradient_of(data["weight"].toTensor()) : sum_like(weight);
    }
    if (bias.defined() && context->needs_input_grad(2)) {
      sums.bias_sum = sum_like(bias);
    }
    if (settings.half_rows()) {
      HalfCrossEntropy::ForwardState left{
          saved[4], undefined_if_empty(saved[5]), {}};
      // They are written over: another backward computes them again.
      if (data.count("scores") > 0) {
        left.scores = data["scores"].toTensor();
        data.erase("scores");
      }
      half_of(hidden, weight, copy, bias, saved[3], settings)
          .backward(gradients[0], left, sums);
    } else {
      const Scores scores(hidden, weight, copy, bias, saved[3], settings);
      ScoreBackward backward(scores, settings, gradients[0]);
      backward.hidden = sums.hidden;
      backward.weight = sums.weight_sum;
      backward.weight_is_new = !straight;
      backward.bias = sums.bias_sum;
      backward.run();
    }
    return {sums.hidden,
            straight ? Tensor() : as(sums.weight_sum, weight),
            as(sums.bias_sum, bias),
            {},
            {},
            {}};
  }

 private:
  static Tensor gradient_of(Tensor weight) {
    Tensor& gradient = weight.mutable_grad();
    if (!gradient.defined()) gradient = torch::zeros_like(weight.detach());
    return gradient;
  }
  /// Sums of many parts in half precision would lose the small ones.
  static Tensor sum_like(const Tensor& tensor) {
    return torch::zeros_like(tensor, tensor.element_size() == 2
                                         ? torch::kFloat
                                         : tensor.scalar_type());
  }
  static Tensor as(const Tensor& sum, const Tensor& tensor) {
    return sum.defined() ? sum.to(tensor.scalar_type()) : sum;
  }
};

int64_t scores_at_a_time(const Tensor& hidden, const Tensor& weight,
                         bool half_rows) {
  if (!hidden.is_cuda()) return kScoresAtATime;
  if (!half_rows || !HalfCrossEntropy::has_kernels(hidden)) {
    return kScoresAtATimeOnCuda;
  }
  // And 64 rows more, for parts are whole tiles.
  return std::max(kScoresOfKernels,
                  (hidden.size(0) / kPartsOfKernels + 64) * weight.size(0));
}

void check_arguments(const Tensor& hidden, const Tensor& weight,
                     const Tensor& bias, const Tensor& targets,
                     const LinearCrossEntropyOptions& options) {
  TORCH_CHECK(
      hidden.dim() == 2 && weight.dim() == 2 &&
          hidden.size(1) == weight.size(1),
      "[linear_cross_entropy] expected hidden (N, D) and weight (V, D), "
      "got ",
      hidden.sizes(), " and ", weight.sizes());
  TORCH_CHECK(
      !bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.size(0)),
      "[linear_cross_entropy] expected a bias of ", weight.size(0),
      " values, got ", bias.sizes());
  TORCH_CHECK(targets.dim() == 1 && targets.size(0) == hidden.size(0) &&
                  targets.scalar_type() == torch::kLong,
              "[linear_cross_entropy] expected ", hidden.size(0),
              " targets of type int64, got ", targets.sizes(), " of ",
              targets.scalar_type());
  TORCH_CHECK(
      options.chunk_scores >= 0,
      "[linear_cross_entropy] expected chunk_scores of at least 1, or 0, got ",
      options.chunk_scores);
}

}  // namespace

LinearCrossEntropy linear_cross_entropy(
    const Tensor& hidden, const Tensor& weight, const Tensor& bias,
    const Tensor& targets, const LinearCrossEntropyOptions& options) {
  check_arguments(hidden, weight, bias, targets, options);
  const auto own_type = hidden.scalar_type();
  ScoreSettings settings{};
  settings.ignore_index = options.ignore_index;
  settings.by_columns = options.weight_gradient.value_or(
                            hidden.is_cuda() ? WeightGradient::kByRows
                                             : WeightGradient::kByColumns) ==
                        WeightGradient::kByColumns;
  settings.product_type = compat::autocast_type(hidden);
  settings.loss_type = options.loss_type.value_or(
      own_type == torch::kDouble ? torch::kDouble : torch::kFloat);
  settings.count_right = options.count_right;
  settings.chunk_scores =
      options.chunk_scores > 0
          ? options.chunk_scores
          : scores_at_a_time(hidden, weight, settings.half_rows());
  const Tensor copy =
      WeightCopies::find(weight, settings.product_type, /*padded=*/true);
  const auto results = CrossEntropyOperator::apply(
      hidden, weight, defined_or_empty(bias, hidden), targets,
      defined_or_empty(copy, hidden), settings);
  return {results[0], options.count_right ? results[1] : Tensor()};
}

}  // namespace reprise
