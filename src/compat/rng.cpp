#include "compat/rng.h"

#include "compat/cuda_graph.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

namespace reprise::compat {

/// The data that CPUGeneratorImpl::get_state() writes to a tensor.
struct RngState::CpuState {
  explicit CpuState(at::CPUGeneratorImpl& generator)
      : engine(generator.engine()),
        next_float(generator.next_float_normal_sample()),
        next_double(generator.next_double_normal_sample()) {}

  void restore(at::CPUGeneratorImpl& generator) const {
    generator.set_engine(engine);
    generator.set_next_float_normal_sample(next_float);
    generator.set_next_double_normal_sample(next_double);
  }

  bool operator==(const CpuState& other) const {
    // Compared by field, because padding bytes are not set.
    const auto a = engine.data();
    const auto b = other.engine.data();
    return a.seed_ == b.seed_ && a.left_ == b.left_ && a.next_ == b.next_ &&
           a.state_ == b.state_ && next_float == other.next_float &&
           next_double == other.next_double;
  }

  at::mt19937 engine;
  // The type of optional depends on LibTorch's version.
  decltype(std::declval<at::CPUGeneratorImpl&>()
               .next_float_normal_sample()) next_float;
  decltype(std::declval<at::CPUGeneratorImpl&>()
               .next_double_normal_sample()) next_double;
};

namespace {

/// Returns null if `generator` is not a CPU generator.
at::CPUGeneratorImpl* cpu_generator(const at::Generator& generator) {
  return dynamic_cast<at::CPUGeneratorImpl*>(
      generator.unsafeGetGeneratorImpl());
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0;
}

/// Stores an offset as a state, so that states can be compared by their bytes.
at::Tensor to_bytes(uint64_t position) {
  at::Tensor bytes = at::empty({sizeof(position)}, at::kByte);
  std::memcpy(bytes.data_ptr(), &position, sizeof(position));
  return bytes;
}

uint64_t to_position(const at::Tensor& bytes) {
  uint64_t position = 0;
  std::memcpy(&position, bytes.data_ptr(), sizeof(position));
  return position;
}

}  // namespace

RngState::Entry RngState::entry_of(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  if (const auto position = captured_rng_offset(generator)) {
    return {generator, nullptr, to_bytes(*position), true};
  }
  if (auto* cpu = cpu_generator(generator)) {
    return {generator, std::make_shared<const CpuState>(*cpu), {}, false};
  }
  return {generator, nullptr, generator.get_state(), false};
}

bool RngState::same_state(const Entry& a, const Entry& b) {
  if (a.cpu && b.cpu) return *a.cpu == *b.cpu;
  return !a.cpu && !b.cpu && same_bytes(a.state, b.state);
}

RngState RngState::capture(at::TensorList tensors,
                           const std::vector<at::Generator>& extra) {
  RngState result;
  result.entries_.push_back(
      entry_of(at::globalContext().defaultGenerator(at::kCPU)));
  std::vector<at::Device> devices;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || !tensor.is_cuda()) continue;
    if (std::find(devices.begin(), devices.end(), tensor.device()) ==
        devices.end()) {
      devices.push_back(tensor.device());
      result.entries_.push_back(
          entry_of(at::globalContext().defaultGenerator(tensor.device())));
    }
  }
  for (const at::Generator& generator : extra) {
    result.entries_.push_back(entry_of(generator));
  }
  return result;
}

RngState RngState::capture_like(const RngState& other) {
  RngState result;
  for (const Entry& entry : other.entries_) {
    result.entries_.push_back(entry_of(entry.generator));
  }
  return result;
}

void RngState::restore() const {
  for (const Entry& entry : entries_) {
    at::Generator generator = entry.generator;
    std::lock_guard<std::mutex> lock(generator.mutex());
    if (entry.in_graph) {
      set_captured_rng_offset(generator, to_position(entry.state));
    } else if (entry.cpu) {
      entry.cpu->restore(*cpu_generator(generator));
    } else {
      generator.set_state(entry.state);
    }
  }
}

void RngState::forget_unchanged(const RngState& other) {
  std::vector<Entry> changed;
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (!same_state(entries_[i], other.entries_.at(i))) {
      changed.push_back(std::move(entries_[i]));
    }
  }
  entries_ = std::move(changed);
}

std::vector<at::Tensor> RngState::states() const {
  std::vector<at::Tensor> states;
  for (const Entry& entry : entries_) {
    if (!entry.cpu) {
      states.push_back(entry.state);
      continue;
    }
    auto copy = at::make_generator<at::CPUGeneratorImpl>();
    entry.cpu->restore(*cpu_generator(copy));
    states.push_back(copy.get_state());
  }
  return states;
}

RngState RngState::with_states(const std::vector<at::Tensor>& states) const {
  TORCH_CHECK(states.size() == entries_.size(),
              "[RngState] expected the states of ", entries_.size(),
              " generators, got ", states.size());
  RngState result = *this;
  for (size_t i = 0; i < states.size(); ++i) {
    Entry& entry = result.entries_[i];
    if (!entry.cpu) {
      entry.state = states[i];
      continue;
    }
    auto copy = at::make_generator<at::CPUGeneratorImpl>();
    copy.set_state(states[i]);
    entry.cpu = std::make_shared<const CpuState>(*cpu_generator(copy));
  }
  return result;
}

bool RngState::operator==(const RngState& other) const {
  return std::equal(entries_.begin(), entries_.end(), other.entries_.begin(),
                    other.entries_.end(), [](const Entry& a, const Entry& b) {
                      return a.generator == b.generator &&
                             a.in_graph == b.in_graph && same_state(a, b);
                    });
}

RngGuard::RngGuard(const RngState& state)
    : before_(RngState::capture_like(state)) {
  state.restore();
}

RngGuard::~RngGuard() {
  before_.restore();
}

}  // namespace reprise::compat
