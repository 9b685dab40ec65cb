#include "compat/saved_tensors.h"

#include <reprise/memory/kept.h>
#include <reprise/memory/meter.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace reprise {
namespace {

const void* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl()
                              : nullptr;
}

}  // namespace

struct KeptMeter::State {
  struct Entry {
    int64_t bytes = 0;
    std::map<int, int> holders;  // stage → number of tensors it keeps
  };

  mutable std::mutex mutex;
  std::vector<at::Tensor> excluded_tensors;  // keeps the addresses below valid
  std::unordered_set<const void*> excluded;
  std::unordered_map<const void*, Entry> entries;
  std::vector<int64_t> by_stage;
  int64_t live = 0;
  int64_t peak = 0;

  void add(const void* storage, int64_t bytes, int stage) {
    if (storage == nullptr || excluded.count(storage) != 0) return;
    const std::lock_guard<std::mutex> lock(mutex);
    Entry& entry = entries[storage];
    if (entry.holders.empty()) {
      entry.bytes = bytes;
      live += bytes;
    } else {
      at(entry.holders.begin()->first) -= entry.bytes;
    }
    ++entry.holders[stage];
    at(entry.holders.begin()->first) += entry.bytes;
    peak = std::max(peak, live);
  }

  void remove(const void* storage, int stage) {
    if (storage == nullptr || excluded.count(storage) != 0) return;
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = entries.find(storage);
    Entry& entry = found->second;
    at(entry.holders.begin()->first) -= entry.bytes;
    const auto holder = entry.holders.find(stage);
    if (--holder->second == 0) entry.holders.erase(holder);
    if (entry.holders.empty()) {
      live -= entry.bytes;
      entries.erase(found);
    } else {
      at(entry.holders.begin()->first) += entry.bytes;
    }
  }

  int64_t& at(int stage) {
    const auto index = static_cast<size_t>(stage);
    if (by_stage.size() <= index) by_stage.resize(index + 1);
    return by_stage[index];
  }
};

/// Saves one tensor and counts it.
class KeptHooks final : public compat::SavedTensorHooks {
 public:
  KeptHooks(std::shared_ptr<KeptMeter::State> state, int stage)
      : state_(std::move(state)), stage_(stage) {}

  ~KeptHooks() override {
    if (tensor_.defined()) state_->remove(storage_of(tensor_), stage_);
  }

  void call_pack_hook(const at::Tensor& tensor) override {
    // Detached, because an operator's own output refers to its node, and the
    // node to this hook: a reference cycle.
    tensor_ = tensor.detach();
    version_ = tensor_._version();
    state_->add(storage_of(tensor_), bytes_of(tensor_), stage_);
  }

  at::Tensor call_unpack_hook() override {
    // Autograd does not check the version of tensors saved through hooks.
    TORCH_CHECK(tensor_._version() == version_,
                "[KeptMeter] a tensor of shape ", tensor_.sizes(),
                " that stage ", stage_,
                " saved for backward was modified in place afterwards");
    return tensor_;
  }

  static int64_t bytes_of(const at::Tensor& tensor) {
    if (!tensor.has_storage()) return 0;
    return allocated_bytes(static_cast<int64_t>(tensor.storage().nbytes()),
                           tensor.device());
  }

 private:
  std::shared_ptr<KeptMeter::State> state_;
  int stage_;
  at::Tensor tensor_;
  int64_t version_ = 0;
};

class KeptPolicy final : public compat::SavedTensorPolicy {
 public:
  KeptPolicy(std::shared_ptr<KeptMeter::State> state, int stage)
      : state_(std::move(state)), stage_(stage) {}

  std::unique_ptr<compat::SavedTensorHooks> make_hooks() override {
    return std::make_unique<KeptHooks>(state_, stage_);
  }

 private:
  std::shared_ptr<KeptMeter::State> state_;
  int stage_;
};

namespace {

std::vector<KeptMeter::Target>& targets() {
  thread_local std::vector<KeptMeter::Target> stack;
  return stack;
}

}  // namespace

KeptMeter::KeptMeter(at::TensorList state) : state_(std::make_shared<State>()) {
  for (const at::Tensor& tensor : state) {
    if (!tensor.defined()) continue;
    state_->excluded_tensors.push_back(tensor.detach());
    state_->excluded.insert(storage_of(tensor));
  }
}

int64_t KeptMeter::live_bytes() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->live;
}

int64_t KeptMeter::peak_bytes() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->peak;
}

std::vector<int64_t> KeptMeter::live_by_stage() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->by_stage;
}

std::vector<KeptMeter::Storage> KeptMeter::live_storages() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  std::vector<Storage> storages;
  for (const auto& [storage, entry] : state_->entries) {
    storages.push_back({storage, entry.bytes, entry.holders.begin()->first});
  }
  return storages;
}

void KeptMeter::restart_peak() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->peak = state_->live;
}

std::shared_ptr<void> KeptMeter::hold(const at::Tensor& tensor,
                                      int stage) const {
  auto hooks = std::make_shared<KeptHooks>(state_, stage);
  hooks->call_pack_hook(tensor);
  return hooks;
}

struct KeptMeter::Scope::Impl {
  explicit Impl(std::shared_ptr<KeptPolicy> policy)
      : scope(std::move(policy)) {}
  compat::SavedTensorScope scope;
};

KeptMeter::Scope::Scope(const KeptMeter& meter, int stage) {
  TORCH_CHECK(stage >= 0, "[KeptMeter] expected a non-negative stage, got ",
              stage);
  impl_ =
      std::make_unique<Impl>(std::make_shared<KeptPolicy>(meter.state_, stage));
  targets().push_back(
      {std::shared_ptr<KeptMeter>(new KeptMeter(meter.state_)), stage});
}

KeptMeter::Scope::~Scope() {
  targets().pop_back();
}

KeptMeter::Target KeptMeter::current() {
  return targets().empty() ? Target{} : targets().back();
}

}  // namespace reprise
