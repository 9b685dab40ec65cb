#include "compare_values.h"

#include <reprise/data/safetensors.h>
#include <reprise/recompute/execution.h>
#include <reprise/recompute/strategy.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>
#include <map>

namespace reprise::testing {
namespace {

using torch::Tensor;

/// "transformer.h.0.ln_1.weight" → "transformer.h", "layer1.0..." → "layer1"
std::string group_of(const std::string& name) {
  const size_t first = name.find('.');
  const std::string head = name.substr(0, first);
  const bool body = head == "transformer" || head == "bert" ||
                    head == "model" || head == "vit";
  return body ? name.substr(0, name.find('.', first + 1)) : head;
}

Tensor as_double(const Tensor& tensor) {
  return tensor.detach().cpu().to(torch::kDouble);
}

double largest_of(const Tensor& tensor) {
  return tensor.abs().max().item<double>();
}

class Rows {
 public:
  void add(const std::string& kind, const std::string& name,
           double difference) {
    ValueRow& row = rows_[kind + group_of(name)];
    ++row.tensors;
    // Also true for NaN.
    if (row.worst.empty() || !(difference <= row.difference)) {
      row.difference = difference;
      row.worst = name;
    }
  }

  std::vector<ValueRow> list() const {
    std::vector<ValueRow> list;
    for (const auto& [group, row] : rows_) {
      list.push_back(row);
      list.back().group = group;
    }
    return list;
  }

 private:
  std::map<std::string, ValueRow> rows_;
};

}  // namespace

double ValueReport::largest() const {
  double largest = 0;
  for (const ValueRow& row : rows) {
    if (!(row.difference <= largest)) largest = row.difference;
  }
  return largest;
}

std::string ValueReport::to_string() const {
  std::string text =
      fmt::format("loss {:.8g}, expected {:.8g}, off by {:.1e}\n", loss,
                  expected_loss, loss_difference);
  for (const ValueRow& row : rows) {
    text += fmt::format("{:<32} {:>4} tensors, {:.1e} in {}\n", row.group,
                        row.tensors, row.difference, row.worst);
  }
  return text;
}

ValueReport compare_values(const Model& model, const std::string& values_path,
                           const std::string& strategy,
                           const torch::TensorOptions& where) {
  const SafeTensors values(values_path);
  const auto read = [&](const std::string& name) {
    const Tensor tensor = values.read(name).to(where.device());
    return tensor.is_floating_point() ? tensor.to(where.dtype()) : tensor;
  };
  model.root->to(where.device());
  model.root->to(c10::typeMetaToScalarType(where.dtype()));
  model.root->train();
  model.root->zero_grad();
  std::vector<std::pair<Tensor, Tensor>> buffers;
  for (const Tensor& buffer : model.root->buffers()) {
    buffers.emplace_back(buffer, buffer.clone());
  }

  Execution execution(model.chain, make_schedule(strategy, model.chain.size()));
  const Tensor loss = execution.forward({read("x"), read("targets")}).at(0);
  execution.backward({torch::ones_like(loss)});

  ValueReport report;
  report.loss = loss.item<double>();
  report.expected_loss = values.read("loss").item<double>();
  report.loss_difference =
      std::abs(report.loss - report.expected_loss) / report.expected_loss;
  double scale = 0;
  for (const auto& [name, entry] : values.entries()) {
    if (name.starts_with("grad.")) {
      scale = std::max(scale, largest_of(as_double(values.read(name))));
    }
  }
  Rows rows;
  for (const auto& item : model.root->named_parameters()) {
    const Tensor expected = as_double(values.read("grad." + item.key()));
    TORCH_CHECK(item.value().grad().defined(), "no gradient of ", item.key());
    rows.add("grad ", item.key(),
             largest_of(as_double(item.value().grad()) - expected) /
                 std::max(largest_of(expected), 1e-3 * scale));
  }
  for (const auto& item : model.root->named_buffers()) {
    const Tensor expected = as_double(values.read("buffer." + item.key()));
    rows.add(
        "buffer ", item.key(),
        largest_of(as_double(item.value()) - expected) / largest_of(expected));
  }
  report.rows = rows.list();

  const torch::NoGradGuard no_grad;
  for (auto& [buffer, before] : buffers) buffer.copy_(before);
  model.root->zero_grad();
  return report;
}

}  // namespace reprise::testing
