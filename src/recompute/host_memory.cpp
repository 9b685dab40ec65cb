// Each storage is moved once, even if several saved tensors are views of it.
// Each of these records its own type, sizes, strides and offset.
//
// Whether other code holds a storage is known at the end of the stage: after
// our reference is released, the storage is either freed or still alive. If it
// is alive, moving it frees no memory. The copy is then discarded, and the next
// run of the stage does not start it.
#include "compat/saved_tensors.h"
#include "recompute/host_saves.h"

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

/// Returns a tensor that is a view of `storage`.
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

/// Records which of the storages that a stage saves are also held by other
/// code, as observed in its last run. Storages are numbered in the order of
/// saving. Shared by all runs of the stage.
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

/// State of one run of a stage, from its forward until its autograd graph is
/// destroyed.
class HostRun : public std::enable_shared_from_this<HostRun> {
 public:
  HostRun(std::shared_ptr<HostStore> store,
          std::shared_ptr<HeldElsewhere> elsewhere, const HostOptions& options)
      : store_(std::move(store)),
        elsewhere_(std::move(elsewhere)),
        options_(options),
        outer_(compat::SavedTensorScope::current()),
        target_(KeptMeter::current()) {}

  /// Adds the run to the innermost HostRuns of this thread.
  void register_run() {
    if (innermost() != nullptr) {
      innermost()->list_.push_back(weak_from_this());
    }
  }

  /// Excludes the storages of `tensors` from being moved.
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

  /// A storage at one version.
  struct Moved {
    size_t index = 0;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    c10::VariableVersion counter;
    uint32_t version = 0;
    int64_t bytes = 0;                 // on the device
    std::unique_ptr<HostCopy> copy{};  // null if it stays on the device
    at::Tensor device{};               // the bytes, if they stay on the device
    // The outer hooks that keep it on the device, if there are any.
    std::unique_ptr<compat::SavedTensorHooks> kept{};
    std::shared_ptr<void> counted{};  // keeps it counted after it was fetched
  };

  std::shared_ptr<Moved> add(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
    const uint32_t version = counter.current_version();
    auto& last = latest_[address_of(tensor)];
    // If it was modified in place since, the earlier value cannot be used any
    // more.
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

  /// Called after the stage has run, while its outputs are still held.
  void finish() {
    const std::lock_guard lock(mutex_);
    latest_.clear();
    in_flight_.clear();
    for (const auto& moved : moved_) {
      if (moved->copy) moved->copy->leave();
    }
    for (const auto& moved : moved_) settle(*moved);
    // From now on only the autograd graph holds them.
    for (const auto& moved : moved_) saved_.push_back(moved);
    moved_.clear();
  }

  at::Tensor unpack(Moved& moved) {
    const std::lock_guard lock(mutex_);
    // Autograd does not check the version of tensors saved through hooks.
    TORCH_CHECK(moved.counter.current_version() == moved.version,
                "[host memory] a tensor that a stage saved for backward was "
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
    for (const auto& weak : saved_) {
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

  /// Decides whether the storage stays on the device or on the host.
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

  /// Keeps the storage on the device, through the hooks around this run if
  /// there are any.
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
      for (auto weak = saved_.rbegin(); weak != saved_.rend(); ++weak) {
        const auto moved = weak->lock();
        if (!moved || !moved->copy) continue;
        const at::Tensor& back = moved->copy->fetch();
        if (target_.meter) {
          moved->counted = target_.meter->hold(back, target_.stage);
        }
      }
    } catch (...) {
      fetched_ = false;  // the device ran out of memory
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
  // While the stage runs. The weak reference to a storage prevents its address
  // from being reused.
  std::vector<std::shared_ptr<Moved>> moved_;
  std::unordered_map<const c10::StorageImpl*, std::shared_ptr<Moved>> latest_;
  std::deque<Moved*> in_flight_;
  // After the stage has run, in the order of saving.
  std::vector<std::weak_ptr<Moved>> saved_;
  bool fetched_ = false;
};

namespace {

/// One saved tensor, which is moved or passed to the outer hooks.
class HostHooks final : public compat::SavedTensorHooks {
 public:
  explicit HostHooks(std::shared_ptr<HostRun> run) : run_(std::move(run)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    if (!run_->moves(tensor)) {
      save_outside(tensor);
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
      return view_of(run_->unpack(*moved_).storage(), options_, offset_, sizes_,
                     strides_);
    }
    TORCH_CHECK(tensor_._version() == version_,
                "[host memory] a tensor of shape ", tensor_.sizes(),
                " that a stage saved for backward was modified in place "
                "afterwards");
    return tensor_;
  }

 private:
  void save_outside(const at::Tensor& tensor) {
    if (run_->outer()) outer_ = run_->outer()->make_hooks();
    if (outer_) {
      outer_->call_pack_hook(tensor);
      return;
    }
    // Detached, because an operator's own output refers to its node.
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

detail::HostSaves::HostSaves(std::shared_ptr<HostStore> store,
                             const HostOptions& options)
    : run_(std::make_shared<HostRun>(
          std::move(store), std::make_shared<HeldElsewhere>(), options)) {}

std::unique_ptr<compat::SavedTensorHooks> detail::HostSaves::make_hooks()
    const {
  return std::make_unique<HostHooks>(run_);
}

void detail::HostSaves::finish() {
  run_->finish();
  run_->register_run();
}

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
    run->register_run();
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
