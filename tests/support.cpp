#include "support.h"

#include <reprise/base/error.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace reprise::testing {

torch::Device device() {
  static const char* name = std::getenv("REPRISE_TEST_DEVICE");
  torch::Device device(name == nullptr ? "cpu" : name);
  if (device.is_cuda() && !device.has_index()) device.set_index(0);
  return device;
}

torch::TensorOptions on_device(torch::ScalarType type) {
  return torch::TensorOptions(device()).dtype(type);
}

::testing::AssertionResult same(const torch::Tensor& a,
                                const torch::Tensor& b) {
  if (a.defined() != b.defined()) {
    return ::testing::AssertionFailure() << "one is undefined";
  }
  if (!a.defined()) return ::testing::AssertionSuccess();
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) {
    return ::testing::AssertionFailure()
           << a.toString() << a.sizes() << " and " << b.toString() << b.sizes();
  }
  if (a.numel() == 0) return ::testing::AssertionSuccess();
  const auto x = a.detach().cpu().contiguous();
  const auto y = b.detach().cpu().contiguous();
  if (std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0) {
    return ::testing::AssertionSuccess();
  }
  const auto difference =
      (x.to(torch::kDouble) - y.to(torch::kDouble)).abs().max().item<double>();
  const auto scale = x.to(torch::kDouble).abs().max().item<double>();
  if (device().is_cuda() && difference <= 1e-5 * scale) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure()
         << "the tensors differ by up to " << difference << " at a scale of "
         << scale;
}

namespace {

/// Whether a matrix product computed in slices is bit-identical to the whole product.
bool sliced_products_are_exact() {
  const torch::Tensor x = torch::rand({900, 64}, on_device());
  const torch::Tensor w = torch::rand({5003, 64}, on_device());
  const torch::Tensor g = torch::rand({900, 5003}, on_device());
  const auto row_slices_match = [](const torch::Tensor& a,
                                   const torch::Tensor& b) {
    const torch::Tensor whole = torch::mm(a, b);
    const int64_t slice =
        a.size(0) / 192 *
        64;  // a multiple of the tile size; the last slice is larger
    const auto rows = [&](int64_t first, int64_t count) {
      return torch::equal(torch::mm(a.narrow(0, first, count), b),
                          whole.narrow(0, first, count));
    };
    return rows(0, slice) && rows(slice, slice) &&
           rows(2 * slice, a.size(0) - 2 * slice);
  };
  const auto column_slices_match = [&](const torch::Tensor& a,
                                       const torch::Tensor& b) {
    const torch::Tensor whole = torch::mm(a, b);
    const int64_t slice = b.size(1) / 192 * 64;
    return torch::equal(torch::mm(a, b.narrow(1, slice, slice)),
                        whole.narrow(1, slice, slice));
  };
  return row_slices_match(x, w.t()) && column_slices_match(x, w.t()) &&
         row_slices_match(g, w) && row_slices_match(g.t(), x);
}

}  // namespace

::testing::AssertionResult same_in_parts(const torch::Tensor& a,
                                         const torch::Tensor& b) {
  static const bool exact = sliced_products_are_exact();
  if (exact) return same(a, b);
  const double scale = a.abs().max().item<double>();
  const double difference = (a - b).abs().max().item<double>();
  if (difference <= 1e-5 * scale) return ::testing::AssertionSuccess();
  return same(a, b);
}

double relative_error(const torch::Tensor& a, const torch::Tensor& b) {
  const auto x = a.detach().cpu().to(torch::kDouble);
  const auto y = b.detach().cpu().to(torch::kDouble);
  return ((x - y).norm() / x.norm()).item<double>();
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "expected an error";
  return "";
}

void Recorder::before(const Op& op) {
  ops.push_back(op);
}

int Recorder::runs(int stage) const {
  return static_cast<int>(
      std::count_if(ops.begin(), ops.end(), [stage](const Op& op) {
        return op.stage == stage && is_forward(op.kind);
      }));
}

Chain equal_stages(int count, int64_t width) {
  std::vector<Stage> stages;
  for (int i = 0; i < count; ++i) {
    torch::nn::Linear linear(width, width);
    linear->to(device());
    stages.push_back(make_stage("stage" + std::to_string(i),
                                [linear](const torch::Tensor& x) mutable {
                                  return torch::tanh(linear(x));
                                },
                                {linear.ptr()}));
  }
  return Chain(std::move(stages));
}

std::vector<torch::Tensor> take_gradients(
    std::vector<torch::Tensor> parameters) {
  std::vector<torch::Tensor> gradients;
  for (auto& parameter : parameters) {
    gradients.push_back(parameter.grad().defined() ? parameter.grad().clone()
                                                   : torch::Tensor());
    parameter.mutable_grad().reset();
  }
  return gradients;
}

}  // namespace reprise::testing
