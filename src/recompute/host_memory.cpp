// What is moved is a storage, once, however many of the saved tensors are views of it;
// each of them remembers its own type, sizes, strides and offset.
//
// Whether somebody else holds a storage is known when the stage has ended: with our
// own hold on it gone, it is either freed or still there. Where it is there, moving
// it frees nothing, and it stays; the copy was for nothing, and the next run of the
// stage does not begin it.
#include "compat/saved_tensors.h"

#include <reprise/memory/kept.h>
#include <reprise/memory/meter.h>
#include <reprise/recompute/host_memory.h>

#include <torch/csrc/autograd/grad_mode.h>

#include <deque>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace reprise {
namespace {

const c10::StorageImpl* address_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

/// A tensor on `storage` as it is, without copying.
at::Tensor view_of(const c10::Storage& storage, at::TensorOptions options,
                   int64_t offset, at::IntArrayRef sizes,
                   at::IntArrayRef strides) {
  const torch::NoGradGuard no_grad;
  at::Tensor view = at::empty({0}, options.requires_grad(false));
  view.set_(storage, offset, sizes, strides);
  return view;
}

at::Tensor all_bytes(const c10::Storage& storage) {
  return view_of(storage, at::TensorOptions(at::kByte).device(storage.device()),
                 0, {static_cast<int64_t>(storage.nbytes())}, {1});
}

/// Which of the storages that a stage saves, by their number, others hold too: as its
/// last run showed. Shared by all runs of the stage.
class HeldElsewhere {
 public:
  bool get(size_t index) const {
    const std::lock_guard lock(mutex_);
    return index < held_.size() && held_[index];
  }
  void set(size_t index, bool held) {
    const std::lock_guard lock(mutex_);
    if (index >= held_.size()) held_.resize(index + 1);
    held_[index] = held;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<bool> held_;
};

HostRuns*& innermost() {
  thread_local HostRuns* runs = nullptr;
  return runs;
}

}  // namespace

/// One run of a stage, from its forward until its graph is gone.
class HostRun : public std::enable_shared_from_this<HostRun> {
 public:
  HostRun(std::shared_ptr<HostStore> store,
          std::shared_ptr<HeldElsewhere> elsewhere, const HostOptions& options)
      : store_(std::move(store)),
        elsewhere_(std::move(elsewhere)),
        options_(options),
        outer_(compat::SavedTensorScope::current()),
        target_(KeptMeter::current()) {}

  /// The run has begun; for whoever keeps the list.
  void announce() {
    if (innermost() != nullptr) {
      innermost()->list_.push_back(weak_from_this());
    }
  }

  /// Whose storages are never moved.
  void exclude(const Tensors& tensors) {
    for (const auto& tensor : tensors) {
      if (tensor.defined() && tensor.has_storage()) {
        excluded_.insert(address_of(tensor));
      }
    }
  }

  bool moves(const at::Tensor& tensor) const {
    return tensor.has_storage() && tensor.layout() == at::kStrided &&
           !tensor.is_quantized() && !tensor.is_conj() && !tensor.is_neg() &&
           tensor.device() == store_->device() &&
           static_cast<int64_t>(tensor.storage().nbytes()) >=
               options_.min_bytes &&
           excluded_.count(address_of(tensor)) == 0;
  }

  /// A storage as it was at one moment.
  struct Moved {
    size_t index = 0;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    c10::VariableVersion counter;
    uint32_t version = 0;
    int64_t bytes = 0;                 // on the device
    std::unique_ptr<HostCopy> copy{};  // null: it stays on the device,
    at::Tensor device{};               // as this,
    std::unique_ptr<compat::SavedTensorHooks> kept{};  // or in the outer hooks
    std::shared_ptr<void> counted{};  // by the meter, once it is back
  };

  std::shared_ptr<Moved> add(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
    const uint32_t version = counter.current_version();
    auto& last = latest_[address_of(tensor)];
    // Changed in place since: the earlier value can no longer be used anyway.
    if (last && last->version == version) return last;
    last = std::make_shared<Moved>(Moved{
        moved_.size(), tensor.storage().getWeakStorageImpl(), counter, version,
        allocated_bytes(static_cast<int64_t>(tensor.storage().nbytes()),
                        tensor.device())});
    moved_.push_back(last);
    const at::Tensor bytes = all_bytes(tensor.storage());
    if (elsewhere_->get(last->index)) {
      last->device = bytes;
    } else {
      send(*last, bytes);
    }
    return last;
  }

  /// The stage has run; its outputs are still held.
  void finish() {
    const std::lock_guard lock(mutex_);
    latest_.clear();
    in_flight_.clear();
    for (const auto& moved : moved_) {
      if (moved->copy) moved->copy->leave();
    }
    for (const auto& moved : moved_) settle(*moved);
    // From here on the graph alone holds them.
    for (const auto& moved : moved_) left_.push_back(moved);
    moved_.clear();
  }

  at::Tensor open(Moved& moved) {
    const std::lock_guard lock(mutex_);
    // Autograd leaves this check out for tensors behind hooks.
    TORCH_CHECK(
        moved.counter.current_version() == moved.version,
        "[host memory] a tensor that a stage saved for its backward was "
        "modified in place afterwards");
    if (moved.kept) return moved.kept->call_unpack_hook();
    if (!moved.copy) return moved.device;
    fetch_all();
    return moved.copy->bytes();
  }

  void fetch() {
    const std::lock_guard lock(mutex_);
    fetch_all();
  }

  int64_t bytes() const {
    const std::lock_guard lock(mutex_);
    int64_t sum = 0;
    for (const auto& weak : left_) {
      const auto moved = weak.lock();
      if (moved && moved->copy) sum += moved->bytes;
    }
    return sum;
  }

  const std::shared_ptr<compat::SavedTensorPolicy>& outer() const {
    return outer_;
  }

 private:
  void send(Moved& moved, const at::Tensor& bytes) {
    moved.copy = store_->send(bytes);
    if (!moved.copy) {
      moved.device = bytes;  // no room
      return;
    }
    in_flight_.push_back(&moved);
    if (in_flight_.size() <= static_cast<size_t>(options_.max_in_flight)) {
      return;
    }
    in_flight_.front()->copy->leave();
    in_flight_.pop_front();
  }

  /// Decides where it stays.
  void settle(Moved& moved) {
    if (moved.copy) {
      auto storage = moved.storage.lock();
      elsewhere_->set(moved.index, storage.defined());
      if (!storage.defined()) return;
      moved.copy.reset();
      keep(moved, all_bytes(c10::Storage(std::move(storage))));
      return;
    }
    const bool held = moved.device.storage().use_count() > 1;
    elsewhere_->set(moved.index, held);
    at::Tensor device = std::exchange(moved.device, {});
    if (!held) moved.copy = store_->send(device);
    if (moved.copy) {
      device.reset();
      moved.copy->leave();
    } else {
      keep(moved, std::move(device));
    }
  }

  /// On the device, as whoever is around this run keeps it.
  void keep(Moved& moved, at::Tensor device) {
    if (outer_) moved.kept = outer_->make_hooks();
    if (moved.kept) {
      moved.kept->call_pack_hook(device);
    } else {
      moved.device = std::move(device);
    }
  }

  void fetch_all() {
    if (std::exchange(fetched_, true)) return;
    try {
      for (auto weak = left_.rbegin(); weak != left_.rend(); ++weak) {
        const auto moved = weak->lock();
        if (!moved || !moved->copy) continue;
        const at::Tensor& back = moved->copy->fetch();
        if (target_.meter) {
          moved->counted = target_.meter->hold(back, target_.stage);
        }
      }
    } catch (...) {
      fetched_ = false;  // there was no room for all of it
      throw;
    }
  }

  std::shared_ptr<HostStore> store_;
  std::shared_ptr<HeldElsewhere> elsewhere_;
  HostOptions options_;
  std::shared_ptr<compat::SavedTensorPolicy> outer_;
  KeptMeter::Target target_;
  std::unordered_set<const c10::StorageImpl*> excluded_;
  mutable std::mutex mutex_;
  // While the stage runs. A weak hold on a storage keeps its address from being
  // another's.
  std::vector<std::shared_ptr<Moved>> moved_;
  std::unordered_map<const c10::StorageImpl*, std::shared_ptr<Moved>> latest_;
  std::deque<Moved*> in_flight_;
  // Afterwards, in the order they were saved.
  std::vector<std::weak_ptr<Moved>> left_;
  bool fetched_ = false;
};

namespace {

/// One saved tensor: moved, or left to the hooks around.
class HostHooks final : public compat::SavedTensorHooks {
 public:
  explicit HostHooks(std::shared_ptr<HostRun> run) : run_(std::move(run)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    if (!run_->moves(tensor)) {
      leave_to_outer(tensor);
      return;
    }
    moved_ = run_->add(tensor);
    options_ = tensor.options();
    sizes_ = tensor.sizes().vec();
    strides_ = tensor.strides().vec();
    offset_ = tensor.storage_offset();
  }

  at::Tensor call_unpack_hook() override {
    if (outer_) return outer_->call_unpack_hook();
    if (moved_) {
      return view_of(run_->open(*moved_).storage(), options_, offset_, sizes_,
                     strides_);
    }
    TORCH_CHECK(tensor_._version() == version_,
                "[host memory] a tensor of shape ", tensor_.sizes(),
                " that a stage saved for its backward was modified in place "
                "afterwards");
    return tensor_;
  }

 private:
  void leave_to_outer(const at::Tensor& tensor) {
    if (run_->outer()) outer_ = run_->outer()->make_hooks();
    if (outer_) {
      outer_->call_pack_hook(tensor);
      return;
    }
    // Detached: an operator's own output would otherwise hold its node.
    tensor_ = tensor.detach();
    version_ = tensor_._version();
  }

  std::shared_ptr<HostRun> run_;
  std::shared_ptr<HostRun::Moved> moved_;
  at::TensorOptions options_;
  std::vector<int64_t> sizes_, strides_;
  int64_t offset_ = 0;
  std::unique_ptr<compat::SavedTensorHooks> outer_;
  at::Tensor tensor_;
  int64_t version_ = 0;
};

class HostPolicy final : public compat::SavedTensorPolicy {
 public:
  explicit HostPolicy(std::shared_ptr<HostRun> run) : run_(std::move(run)) {}
  std::unique_ptr<compat::SavedTensorHooks> make_hooks() override {
    return std::make_unique<HostHooks>(run_);
  }

 private:
  std::shared_ptr<HostRun> run_;
};

}  // namespace

Stage with_host_variant(const Stage& stage, std::shared_ptr<HostStore> store,
                        const HostOptions& options) {
  TORCH_CHECK(store, "[with_host_variant] expected a store, got none");
  auto elsewhere = std::make_shared<HeldElsewhere>();
  return stage.with_variant(kOnHost, [function = stage.function(),
                                      modules = stage.modules(), store,
                                      elsewhere,
                                      options](const Tensors& inputs) {
    if (!torch::GradMode::is_enabled()) return function(inputs);
    const auto run = std::make_shared<HostRun>(store, elsewhere, options);
    run->exclude(inputs);
    for (const auto& module : modules) {
      run->exclude(module->parameters());
      run->exclude(module->buffers());
    }
    Tensors outputs;
    {
      const compat::SavedTensorScope scope(std::make_shared<HostPolicy>(run));
      outputs = function(inputs);
    }
    run->finish();
    run->announce();
    return outputs;
  });
}

Chain with_host_variants(const Chain& chain,
                         const std::shared_ptr<HostStore>& store,
                         const HostOptions& options) {
  std::vector<Stage> stages;
  for (int i = 0; i < chain.size(); ++i) {
    stages.push_back(with_host_variant(chain[i], store, options));
  }
  return Chain(std::move(stages));
}

int host_variant(const Stage& stage) {
  const auto& variants = stage.variants();
  for (size_t i = 0; i < variants.size(); ++i) {
    if (variants[i].name == kOnHost) return static_cast<int>(i) + 1;
  }
  return 0;
}

HostRuns::HostRuns() : outer_(std::exchange(innermost(), this)) {}

HostRuns::~HostRuns() {
  innermost() = outer_;
}

int64_t host_bytes(const HostRuns::List& runs) {
  int64_t sum = 0;
  for (const auto& weak : runs) {
    if (const auto run = weak.lock()) sum += run->bytes();
  }
  return sum;
}

void fetch(const HostRuns::List& runs) {
  for (const auto& weak : runs) {
    if (const auto run = weak.lock()) run->fetch();
  }
}

}  // namespace reprise
