#include "train/optim/list_optimizer.h"

#include "compat/fused_optimizer.h"
#include "compat/reserved_scope.h"

#include <reprise/memory/meter.h>
#include <reprise/ops/weight_copies.h>

#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

namespace reprise {
namespace {

// Bound for the size of a list, whose update needs temporaries of the same
// size. Without it they would add a copy of the model to the peak. Lists of
// this size are large enough to amortize the launch overhead.
constexpr size_t kChunkBytes = size_t{32} << 20;

constexpr char kStep[] = "step";

torch::Tensor counter(int64_t value) {
  return torch::scalar_tensor(value, torch::kLong);
}

int64_t count_in(const std::string& name, const torch::Tensor& tensor) {
  TORCH_CHECK(tensor.scalar_type() == torch::kLong && tensor.numel() == 1,
              "[Optimizer::load] expected one int64 as '", name, "', got ",
              tensor.scalar_type(), " ", tensor.sizes());
  const auto count = tensor.item<int64_t>();
  TORCH_CHECK(count >= 0,
              "[Optimizer::load] expected a count of 0 or more as '", name,
              "', got ", count);
  return count;
}

size_t bytes_of(const std::vector<torch::Tensor>& tensors) {
  size_t bytes = 0;
  for (const auto& tensor : tensors) bytes += tensor.nbytes();
  return bytes;
}

void check_rate(double lr) {
  TORCH_CHECK(std::isfinite(lr) && lr >= 0,
              "[Optimizer::step] expected a learning rate of 0 or more, got ",
              lr);
}

/// Returns `gradient` with the strides of `parameter`, as fused kernels
/// require.
torch::Tensor like(const torch::Tensor& parameter,
                   const torch::Tensor& gradient) {
  if (gradient.strides() == parameter.strides() &&
      gradient.scalar_type() == parameter.scalar_type()) {
    return gradient;
  }
  return torch::empty_like(parameter).copy_(gradient);
}

}  // namespace

ListOptimizer::ListOptimizer(const NamedTensors& parameters,
                             std::vector<std::string> kinds)
    : kinds_(std::move(kinds)) {
  std::set<const c10::TensorImpl*> seen;
  std::set<std::string> names;
  for (const auto& [name, parameter] : parameters) {
    TORCH_CHECK(parameter.defined() && parameter.is_floating_point(),
                "[make_optimizer] expected a floating-point parameter, got ",
                parameter.defined() ? parameter.toString() : "none", " as '",
                name, "'");
    TORCH_CHECK(names.insert(name).second,
                "[make_optimizer] expected names that differ, got '", name,
                "' twice");
    // Tied weights are one parameter with the first of their names.
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    places_.emplace(parameter.unsafeGetTensorImpl(), entries_.size());
    entries_.push_back({name, parameter, 0, Tensors(kinds_.size()), {}});
  }
}

std::optional<std::vector<int64_t>> ListOptimizer::shape_of(
    size_t, const torch::Tensor& parameter) const {
  return parameter.sizes().vec();
}

torch::ScalarType ListOptimizer::type_of(size_t,
                                         const torch::Tensor& parameter) const {
  return is_rounded(parameter) ? torch::kFloat : parameter.scalar_type();
}

ListOptimizer::Tensors ListOptimizer::make_workspace(const List&) {
  return {};
}

bool ListOptimizer::has_fused(torch::Device) const {
  return false;
}

void ListOptimizer::update_fused(const List&, double) {
  TORCH_INTERNAL_ASSERT(false);
}

bool ListOptimizer::updates_split(const torch::Tensor&, const Tensors&) const {
  return false;
}

torch::Tensor ListOptimizer::make_tensor(size_t kind,
                                         const torch::Tensor& parameter) const {
  const auto shape = shape_of(kind, parameter);
  if (!shape) return {};
  const auto type = type_of(kind, parameter);
  // zeros_like keeps the memory format as well.
  return parameter.sizes() == *shape && parameter.scalar_type() == type
             ? torch::zeros_like(parameter)
             : torch::zeros(*shape, parameter.options().dtype(type));
}

void ListOptimizer::make_state(Entry& entry) const {
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    if (!entry.state[kind].defined()) {
      entry.state[kind] = make_tensor(kind, entry.parameter);
    }
  }
}

bool ListOptimizer::has_gradient(const Entry& entry) {
  const torch::Tensor& gradient = entry.parameter.grad();
  if (!gradient.defined() || gradient.numel() == 0) return false;
  TORCH_CHECK(gradient.layout() == torch::kStrided,
              "[Optimizer::step] expected dense gradients, got ",
              gradient.layout(), " of '", entry.name, "'");
  return true;
}

std::vector<ListOptimizer::Entry*> ListOptimizer::with_gradient() {
  std::vector<Entry*> found;
  for (Entry& entry : entries_) {
    if (has_gradient(entry)) found.push_back(&entry);
  }
  return found;
}

bool ListOptimizer::can_fuse(const std::vector<Entry*>& entries) const {
  if (entries.empty()) return false;
  const torch::Tensor& first = entries[0]->parameter;
  // On the CPU fused kernels have no advantage, because lists are processed one
  // tensor at a time.
  if (!first.is_cuda() || !has_fused(first.device())) return false;
  for (const Entry* entry : entries) {
    if (entry->parameter.device() != first.device() ||
        entry->parameter.scalar_type() != first.scalar_type() ||
        !compat::fits_fused(entry->parameter)) {
      return false;
    }
  }
  return true;
}

ListOptimizer::List ListOptimizer::list_of(
    const std::vector<Entry*>& entries) const {
  List list;
  list.state.resize(kinds_.size());
  for (const Entry* entry : entries) {
    list.parameters.push_back(entry->parameter);
    list.gradients.push_back(entry->parameter.grad());
    list.counts.push_back(entry->count + 1);
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      list.state[kind].push_back(entry->state[kind]);
    }
  }
  return list;
}

std::vector<ListOptimizer::List> ListOptimizer::lists_of(
    const std::vector<Entry*>& entries, size_t most_bytes) const {
  std::vector<List> lists;
  std::vector<Entry*> chunk;
  size_t bytes = 0;
  for (Entry* entry : entries) {
    const size_t more = entry->parameter.nbytes();
    if (!chunk.empty() && bytes + more > most_bytes) {
      lists.push_back(list_of(chunk));
      chunk.clear();
      bytes = 0;
    }
    chunk.push_back(entry);
    bytes += more;
  }
  if (!chunk.empty()) lists.push_back(list_of(chunk));
  return lists;
}

std::vector<ListOptimizer::List> ListOptimizer::lists_by_type(
    const std::vector<Entry*>& entries) const {
  std::map<std::pair<std::string, torch::ScalarType>, std::vector<Entry*>> sets;
  for (Entry* entry : entries) {
    const torch::Tensor& p = entry->parameter;
    sets[{p.device().str(), p.scalar_type()}].push_back(entry);
  }
  std::vector<List> lists;
  for (const auto& item : sets) lists.push_back(list_of(item.second));
  return lists;
}

void ListOptimizer::reserve(const std::vector<List>& lists) const {
  // Allocate and free temporaries of the sizes of the parameters, so that
  // update() finds them in the cache. One large block would not do, because the
  // CUDA allocator has separate pools for small and large blocks.
  Tensors largest;
  size_t most = 0;
  for (const List& list : lists) {
    if (temporaries() == Temporaries::kList) {
      const size_t bytes = bytes_of(list.parameters);
      if (bytes > most) largest = list.parameters;
      most = std::max(most, bytes);
      continue;
    }
    for (const auto& parameter : list.parameters) {
      if (parameter.nbytes() > most) largest = {parameter};
      most = std::max(most, parameter.nbytes());
    }
  }
  Tensors blocks;
  for (const auto& parameter : largest) {
    blocks.push_back(torch::empty_like(parameter));
  }
}

void ListOptimizer::update_all(const std::vector<List>& lists, bool fused,
                               double lr) {
  run_reserved([&] {
    for (const List& list : lists) {
      std::vector<int64_t> versions;
      for (const auto& p : list.parameters) versions.push_back(p._version());
      if (fused) {
        update_fused(list, lr);
      } else {
        update(list, lr);
      }
      // Operators on lists need not count a change, by which others recognise it.
      for (size_t i = 0; i < versions.size(); ++i) {
        const auto& p = list.parameters[i];
        if (p._version() == versions[i]) {
          p.unsafeGetTensorImpl()->bump_version();
        }
      }
    }
  });
}

void ListOptimizer::run_reserved(const std::function<void()>& updates) {
  const compat::ReservedScope reserved;
  try {
    updates();
  } catch (const c10::Error& error) {
    // Replace the error message, because callers would take an allocation
    // failure for one that changed nothing.
    TORCH_CHECK(
        !is_out_of_memory(error),
        "[Optimizer::step] no memory in the middle of an update, though "
        "it had been set aside; the parameters are neither old nor new: "
        "go on from a saved state");
    throw;
  }
}

void ListOptimizer::prepare(std::vector<List>& lists, bool fused) {
  if (fused) {
    for (List& list : lists) {
      for (size_t i = 0; i < list.parameters.size(); ++i) {
        list.gradients[i] = like(list.parameters[i], list.gradients[i]);
      }
      torch::empty({1}, list.parameters[0].options());  // for its scalars
    }
  } else if (temporaries() == Temporaries::kLargest ||
             temporaries() == Temporaries::kList) {
    reserve(lists);
  }
}

void ListOptimizer::restore_split(const std::vector<Entry*>& entries,
                                  bool fused) const {
  Tensors restored;
  for (const Entry* entry : entries) {
    // Chunks of state in host memory may have a part of the parameter.
    if (!fused || entry->block.defined() ||
        !updates_split(entry->parameter, entry->state)) {
      restored.push_back(entry->parameter);
    }
  }
  WeightCopies::restore(restored);
}

void ListOptimizer::apply(const std::vector<Entry*>& all, double lr,
                          bool partial, bool captured) {
  const torch::NoGradGuard no_grad;
  // Allocate everything before any value changes, so that a step can be
  // repeated if an allocation fails.
  std::vector<Entry*> entries, on_host, rounded;
  for (Entry* entry : all) {
    make_state(*entry);
    (entry->block.defined()         ? on_host
     : is_rounded(entry->parameter) ? rounded
                                    : entries)
        .push_back(entry);
  }
  const bool fused = can_fuse(entries);
  restore_split(all, fused);
  std::vector<List> lists;
  if (fused) {
    lists.push_back(list_of(entries));
  } else if (temporaries() == Temporaries::kWorkspace) {
    lists = lists_by_type(entries);
    for (List& list : lists) list.workspace = make_workspace(list);
  } else {
    lists = lists_of(entries, kChunkBytes);
  }
  prepare(lists, fused);
  if (fused && partial) add_step_values(lists[0], entries, captured);
  // Other updates would repeat the values of this one.
  for (const List& list : lists) {
    TORCH_CHECK(
        !captured || !list.parameters[0].is_cuda() || !list.step_values.empty(),
        "the update of a parameter cannot be captured");
  }
  const std::vector<RoundedList> in_half = rounded_lists(rounded);
  TORCH_CHECK(!captured || in_half.empty(),
              "the update of a parameter cannot be captured: it is in bf16");
  TORCH_CHECK(!captured || on_host.empty() || !on_host[0]->parameter.is_cuda(),
              "the update of a parameter cannot be captured: its state is in "
              "host memory");
  const auto update = [&] {
    update_all(lists, fused, lr);
    run_reserved([&] {
      for (const RoundedList& list : in_half) update_rounded(list, lr);
    });
  };
  if (on_host.empty()) return update();
  apply_on_host(on_host, lr, update);
}

void ListOptimizer::step(double lr) {
  check_rate(lr);
  const auto entries = with_gradient();
  apply(entries, lr, /*partial=*/false, /*captured=*/false);
  for (Entry* entry : entries) ++entry->count;
  ++step_;
}

NamedTensors ListOptimizer::state() const {
  NamedTensors result;
  if (step_ == 0) return result;
  if (host_) host_->synchronize();
  result.emplace_back(kStep, counter(step_));
  for (const Entry& entry : entries_) {
    if (entry.count != step_) {
      result.emplace_back(std::string(kStep) + "." + entry.name,
                          counter(entry.count));
    }
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      if (entry.count > 0 && entry.state[kind].defined()) {
        result.emplace_back(kinds_[kind] + "." + entry.name, entry.state[kind]);
      }
    }
  }
  return result;
}

ListOptimizer::Tensors ListOptimizer::held() const {
  Tensors held;
  for (const Entry& entry : entries_) {
    if (entry.block.defined()) continue;
    for (const auto& tensor : entry.state) {
      if (tensor.defined()) held.push_back(tensor);
    }
  }
  return held;
}

ListOptimizer::Saved ListOptimizer::sort(const NamedTensors& state) const {
  // `kinds_.size()` stands for the counter.
  std::map<std::string, std::pair<size_t, size_t>> places;
  for (size_t i = 0; i < entries_.size(); ++i) {
    for (size_t kind = 0; kind <= kinds_.size(); ++kind) {
      const std::string label = kind < kinds_.size() ? kinds_[kind] : kStep;
      places.emplace(label + "." + entries_[i].name, std::pair(kind, i));
    }
  }
  Saved saved;
  saved.tensors.assign(entries_.size(), Tensors(kinds_.size()));
  saved.counts.resize(entries_.size());
  std::set<std::string> seen;
  for (const auto& [name, tensor] : state) {
    TORCH_CHECK(tensor.defined() && seen.insert(name).second,
                "[Optimizer::load] expected one tensor as '", name, "', got ",
                tensor.defined() ? "two" : "none");
    if (name == kStep) {
      saved.step = count_in(name, tensor);
      continue;
    }
    const auto found = places.find(name);
    TORCH_CHECK(found != places.end(), "[Optimizer::load] expected the state ",
                "of this optimizer and these parameters, got the unknown '",
                name, "'");
    const auto [kind, i] = found->second;
    if (kind == kinds_.size()) {
      saved.counts[i] = count_in(name, tensor);
      continue;
    }
    const torch::Tensor& parameter = entries_[i].parameter;
    const auto shape = shape_of(kind, parameter);
    const auto type = type_of(kind, parameter);
    TORCH_CHECK(
        shape && tensor.sizes() == *shape && tensor.scalar_type() == type,
        "[Optimizer::load] expected ",
        shape ? c10::str(type, " ", at::IntArrayRef(*shape)) : "nothing",
        " as '", name, "', got ", tensor.scalar_type(), " ", tensor.sizes());
    saved.tensors[i][kind] = tensor;
  }
  return saved;
}

void ListOptimizer::check_complete(const Saved& saved) const {
  for (size_t i = 0; i < entries_.size(); ++i) {
    const int64_t count = saved.counts[i].value_or(saved.step);
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      const bool expected =
          count > 0 && shape_of(kind, entries_[i].parameter).has_value();
      const bool got = saved.tensors[i][kind].defined();
      TORCH_CHECK(expected == got, "[Optimizer::load] expected ",
                  expected ? "a tensor" : "nothing", " as '", kinds_[kind], ".",
                  entries_[i].name, "' after ", count, " updates, got ",
                  got ? "one" : "none");
    }
  }
}

void ListOptimizer::load(const NamedTensors& state) {
  // Check everything before any state changes.
  const Saved saved = sort(state);
  TORCH_CHECK(saved.step > 0 || state.empty(), "[Optimizer::load] expected a '",
              kStep, "' above 0, got none or 0");
  check_complete(saved);

  const torch::NoGradGuard no_grad;
  if (host_) host_->synchronize();
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    entry.count = saved.counts[i].value_or(saved.step);
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      torch::Tensor& own = entry.state[kind];
      const torch::Tensor& given = saved.tensors[i][kind];
      if (!given.defined()) {
        // In host memory there is state before the first update.
        if (!entry.block.defined()) own.reset();
        if (own.defined()) own.zero_();
        continue;
      }
      // Copy, because the tensors may belong to another optimizer.
      if (!own.defined()) own = make_tensor(kind, entry.parameter);
      own.copy_(given);
    }
  }
  step_ = saved.step;
}

}  // namespace reprise
