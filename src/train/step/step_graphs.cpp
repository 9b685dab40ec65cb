#include "train/step/step_graphs.h"

#include "compat/cuda.h"
#include "compat/cuda_graph.h"
#include "compat/foreach.h"
#include "compat/rng.h"

#include <reprise/base/bytes.h>
#include <reprise/memory/meter.h>

#include <fmt/format.h>

#include <algorithm>

namespace reprise::detail {
namespace {

MakeRecorded& instead() {
  static MakeRecorded make;
  return make;
}

class RecordedOnCuda final : public Recorded {
 public:
  RecordedOnCuda(torch::Device device,
                 std::shared_ptr<compat::CudaGraphPool> pool)
      : device_(device), graph_(device.index(), std::move(pool)) {}
  void capture(const std::function<void()>& body) override {
    const MemoryMeter meter(device_);
    graph_.capture(body);
    // Count tensors only, not the unused memory of the pool. A CUDA graph that
    // reuses memory of the pool adds nothing.
    bytes_ = std::min(graph_.bytes(), meter.peak_increase_bytes());
  }
  void replay() override { graph_.replay(); }
  int64_t bytes() const override { return bytes_; }

 private:
  torch::Device device_;
  compat::CudaGraph graph_;
  int64_t bytes_ = 0;
};

MakeRecorded maker(torch::Device device) {
  if (instead()) return instead();
  return [device, pool = std::make_shared<compat::CudaGraphPool>()] {
    return std::make_unique<RecordedOnCuda>(device, pool);
  };
}

/// Returns the sizes and types of the tensors.
std::vector<int64_t> key_of(const Tensors& batch) {
  std::vector<int64_t> key;
  for (const auto& tensor : batch) {
    key.push_back(static_cast<int64_t>(tensor.scalar_type()));
    key.push_back(tensor.dim());
    key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
  }
  return key;
}

/// Returns the error in one line, with the stage in which it occurred.
std::string line_of(const c10::Error& error) {
  std::string text = error.msg().substr(0, error.msg().find('\n'));
  for (const auto& context : error.context()) {
    if (context.starts_with("in stage ")) return text + ", " + context;
  }
  return text;
}

/// Restores the gradient tensors of before a capture, because tensors that were
/// assigned during a capture were never computed.
class SameGradients {
 public:
  explicit SameGradients(const std::vector<torch::Tensor>& parameters)
      : parameters_(parameters) {
    for (const auto& parameter : parameters_) {
      before_.push_back(parameter.grad());
    }
  }
  ~SameGradients() { put_back(); }
  SameGradients(const SameGradients&) = delete;
  SameGradients& operator=(const SameGradients&) = delete;

  /// Restores the gradients. Returns whether none of them was replaced.
  bool put_back() {
    bool same = true;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      torch::Tensor& gradient = parameters_[i].mutable_grad();
      if (gradient.is_same(before_[i])) continue;
      gradient = before_[i];
      same = false;
    }
    return same;
  }

 private:
  std::vector<torch::Tensor> parameters_;
  std::vector<torch::Tensor> before_;
};

}  // namespace

RecordedInstead::RecordedInstead(MakeRecorded make) {
  instead() = std::move(make);
}

RecordedInstead::~RecordedInstead() {
  instead() = nullptr;
}

StepGraphs::StepGraphs(Options options)
    : options_(std::move(options)), meter_(options_.device) {
  decide();
}

void StepGraphs::decide() {
  active_ = false;
  reason_.clear();
  for_memory_ = false;
  TORCH_CHECK(
      options_.mode != GraphMode::kOn || options_.device.is_cuda() || instead(),
      "[--graph] on needs a CUDA device, got ", options_.device,
      "; auto uses graphs where they can be");
  if (options_.mode == GraphMode::kOff) return;
  TORCH_CHECK(options_.mode != GraphMode::kOn || options_.refusal.empty(),
              "[--graph] on: ", options_.refusal);
  if (!options_.refusal.empty()) {
    if (instead() || options_.device.is_cuda()) reason_ = options_.refusal;
  } else if (instead()) {
    active_ = true;
  } else if (options_.device.is_cuda()) {
    reason_ = compat::cuda_graph_unavailable_reason();
    active_ = reason_.empty();
    TORCH_CHECK(active_ || options_.mode != GraphMode::kOn,
                "[--graph] on: ", reason_);
  }
}

StepGraphs::Shape& StepGraphs::shape_of(const Tensors& batch) {
  auto key = key_of(batch);
  for (Shape& shape : shapes_) {
    if (shape.key == key) return shape;
  }
  return shapes_.emplace_back(Shape{std::move(key), false, {}, nullptr});
}

void StepGraphs::see(const Tensors& batch) {
  if (active_) shape_of(batch).seen = true;
}

bool StepGraphs::run(const Tensors& batch, const Step& step) {
  if (!active_) return false;
  // If a tensor moved, such as a gradient that was freed, its address may
  // belong to another tensor.
  if (has_graphs() && places() != places_) clear();
  Shape& shape = shape_of(batch);
  if (!shape.graph) {
    if (!std::exchange(shape.seen, true)) return false;
    if (!capture(shape, batch, step)) return false;
  }
  compat::copy_list(shape.inputs, batch);
  shape.graph->replay();
  ++replays_;
  return true;
}

bool StepGraphs::capture(Shape& shape, const Tensors& batch, const Step& step) {
  const auto graphs =
      std::count_if(shapes_.begin(), shapes_.end(),
                    [](const Shape& other) { return other.graph != nullptr; });
  if (static_cast<size_t>(graphs) >= kMost) return false;
  // Keep the peak so far: memory used by the capture must not count twice.
  peak_bytes_ = peak_bytes();
  std::optional<std::string> failure;
  try {
    record(shape, batch, step);
  } catch (const c10::Error& error) {
    failure = line_of(error);
    for_memory_ = is_out_of_memory(error);
  }
  if (failure) {
    // Outside of the handler, where the memory of the failed capture is freed.
    give_up(*failure);
    return false;
  }
  ++captures_;
  const int64_t own = bytes_ + shape.graph->bytes();
  const int64_t all = live_bytes(options_.device) + own + between_bytes_;
  if (limit_bytes_ > 0 && all > limit_bytes_) {
    give_up_memory(fmt::format(
        "with the {} of its own memory the training would take {}, the budget "
        "is {}",
        format_bytes(own), format_bytes(all), format_bytes(limit_bytes_)));
    return false;
  }
  bytes_ = own;
  meter_.restart();
  return true;
}

void StepGraphs::record(Shape& shape, const Tensors& batch, const Step& step) {
  if (!make_) make_ = maker(options_.device);
  Tensors inputs;
  for (const auto& tensor : batch) inputs.push_back(torch::empty_like(tensor));
  std::unique_ptr<Recorded> graph = make_();
  // Without tensors, this captures the CPU generator only.
  const auto rng = compat::RngState::capture({});
  SameGradients gradients(options_.parameters);
  try {
    // Capture by value, because a replacement for tests calls it later.
    graph->capture([step, inputs] { step(inputs); });
  } catch (...) {
    rng.restore();
    throw;
  }
  if (!(compat::RngState::capture({}) == rng)) {
    rng.restore();
    TORCH_CHECK(false,
                "a stage draws random numbers on the CPU, which a graph would "
                "repeat");
  }
  TORCH_CHECK(gradients.put_back(),
              "a parameter without a gradient got one in the capture");
  shape.inputs = std::move(inputs);
  shape.graph = std::move(graph);
  places_ = places();
}

void StepGraphs::clear() {
  peak_bytes_ = peak_bytes();
  bytes_ = 0;
  shapes_.clear();
  places_.clear();
  make_ = nullptr;  // a memory pool without CUDA graphs cannot be reused
}

void StepGraphs::drop() {
  clear();
  if (!for_memory_) return;
  for_memory_ = false;
  reason_.clear();
  active_ = true;
}

void StepGraphs::set_refusal(const std::string& reason) {
  clear();
  if (reason == options_.refusal) return;
  options_.refusal = reason;
  decide();
}

void StepGraphs::drop_for_memory() {
  if (!has_graphs()) return;
  if (++memory_failures_ < 2) {
    clear();
    return;
  }
  give_up_memory("memory ran out twice beside it");
}

void StepGraphs::give_up_memory(const std::string& reason) {
  for_memory_ = true;
  give_up(reason);
}

void StepGraphs::give_up(const std::string& reason) {
  clear();
  active_ = false;
  reason_ = reason;
  if (options_.device.is_cuda()) compat::empty_cuda_cache();
  if (options_.warn) {
    options_.warn("the micro-step runs without a CUDA graph: " + reason);
  }
}

std::vector<const void*> StepGraphs::places() const {
  std::vector<const void*> found;
  for (const auto& parameter : options_.parameters) {
    const torch::Tensor& gradient = parameter.grad();
    found.push_back(parameter.data_ptr());
    found.push_back(gradient.defined() ? gradient.data_ptr() : nullptr);
  }
  for (const auto& buffer : options_.buffers) {
    found.push_back(buffer.data_ptr());
  }
  return found;
}

int64_t StepGraphs::peak_bytes() {
  if (bytes_ == 0) return peak_bytes_;
  return std::max(peak_bytes_, meter_.peak_bytes() + bytes_);
}

void StepGraphs::restart_peak() {
  peak_bytes_ = 0;
  if (bytes_ > 0) meter_.restart();
}

std::string StepGraphs::state() const {
  if (!reason_.empty()) return "off: " + reason_;
  if (!active_) return "off";
  return captures_ > 0 ? "on" : "off: no shape came often enough";
}

}  // namespace reprise::detail
