// Tested by tests/recompute/host_parameters_test.cpp.
#include "recompute/host_parameters.h"

#include <reprise/memory/meter.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <map>
#include <utility>

namespace reprise::detail {
namespace {

using torch::Tensor;
using Direction = HostTensors::Direction;

constexpr int64_t kAlign = 512;  // bytes
/// Smaller parameters stay on the device: a copy of them takes more time than it saves memory.
constexpr int64_t kLeastBytes = 4096;

int64_t aligned(int64_t bytes) {
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

c10::StorageImpl* storage_of(const Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

int64_t storage_bytes_of(const Tensor& tensor) {
  return static_cast<int64_t>(tensor.storage().nbytes());
}

char* address_of(const Tensor& tensor) {
  return static_cast<char*>(tensor.data_ptr());
}

/// Each stage has one unit.
std::vector<std::vector<size_t>> one_unit_each(const Chain& chain) {
  std::vector<std::vector<size_t>> units;
  for (int i = 0; i < chain.size(); ++i) {
    units.push_back({static_cast<size_t>(i)});
  }
  return units;
}

/// Parameters by the stage that uses them; nothing for those that several stages use.
std::map<const void*, int> stage_by_storage(const Chain& chain) {
  std::map<const void*, int> stages;
  constexpr int kSeveral = -1;
  for (int i = 0; i < chain.size(); ++i) {
    for (const auto& module : chain[i].modules()) {
      for (const Tensor& parameter : module->parameters()) {
        const auto [found, added] = stages.emplace(storage_of(parameter), i);
        if (!added && found->second != i) found->second = kSeveral;
      }
    }
  }
  std::erase_if(stages, [](const auto& item) { return item.second < 0; });
  return stages;
}

}  // namespace

HostParameters::HostParameters(const Chain& chain, torch::Device device,
                               std::shared_ptr<HostTensors> memory)
    : StageParameters(one_unit_each(chain)),
      device_(device),
      memory_(std::move(memory)),
      stages_(static_cast<size_t>(chain.size())),
      stage_bytes_(static_cast<size_t>(chain.size())),
      stage_gradient_bytes_(static_cast<size_t>(chain.size())) {
  const auto stages = stage_by_storage(chain);
  for (int i = 0; i < chain.size(); ++i) {
    StageMemory& stage = at(i);
    std::map<const void*, int64_t> places, gradient_places;  // by storage
    for (const auto& module : chain[i].modules()) {
      for (const Tensor& parameter : module->parameters()) {
        const void* storage = storage_of(parameter);
        if (stages.count(storage) == 0 || parameter.dim() > 3 ||
            !parameter.is_non_overlapping_and_dense() ||
            storage_bytes_of(parameter) < kLeastBytes ||
            !moved_.insert(parameter.unsafeGetTensorImpl()).second) {
          continue;
        }
        const int64_t bytes = aligned(storage_bytes_of(parameter));
        const auto place_in = [&](auto& map, int64_t& sum) {
          const auto [place, added] = map.emplace(storage, sum);
          if (added) sum += bytes;
          return place->second;
        };
        Moved moved{parameter};
        moved.place = place_in(places, stage.bytes);
        if (parameter.requires_grad()) {
          moved.gradient_place =
              place_in(gradient_places, stage.gradient_bytes);
        }
        stage.parameters.push_back(std::move(moved));
      }
    }
    const auto on_device = [&](int64_t bytes) {
      return bytes > 0 ? allocated_bytes(bytes, device) : 0;
    };
    stage_bytes_[static_cast<size_t>(i)] = on_device(stage.bytes);
    stage_gradient_bytes_[static_cast<size_t>(i)] =
        on_device(stage.gradient_bytes);
  }
}

HostParameters::~HostParameters() {
  if (!on_host_) return;
  try {
    open();  // and leave it so
  } catch (const std::exception& error) {
    TORCH_WARN("[HostParameters] the parameters could not be kept: ",
               error.what());
  }
}

bool HostParameters::moves(const Tensor& parameter) const {
  return moved_.count(parameter.unsafeGetTensorImpl()) > 0;
}

int64_t HostParameters::host_bytes() const {
  int64_t bytes = 0;
  for (const StageMemory& stage : stages_) {
    if (stage.block.defined()) bytes += stage.bytes;
    if (stage.gradient_block.defined()) bytes += stage.gradient_bytes;
  }
  return bytes;
}

Tensor HostParameters::view_in(const Tensor& block, int64_t place,
                               const Tensor& parameter) {
  const auto item = static_cast<int64_t>(parameter.element_size());
  return block.narrow(0, place, storage_bytes_of(parameter))
      .view(parameter.scalar_type())
      .as_strided(
          parameter.sizes(), parameter.strides(),
          (block.storage_offset() + place) / item + parameter.storage_offset());
}

void HostParameters::set_memory(const StageMemory& stage,
                                const Tensor& values) const {
  for (const Moved& moved : stage.parameters) {
    set_storage_memory(moved.parameter, values.defined()
                                            ? address_of(values) + moved.place
                                            : nullptr);
  }
}

bool HostParameters::move_to_host() {
  if (on_host_) return true;
  int64_t total = 0;
  for (const StageMemory& stage : stages_) total += stage.bytes;
  if (total == 0) return true;
  const torch::NoGradGuard no_grad;
  const Tensor all = memory_->allocate(total);
  if (!all.defined()) return false;
  int64_t place = 0;
  for (StageMemory& stage : stages_) {
    stage.block = all.narrow(0, place, stage.bytes);
    place += stage.bytes;
    for (Moved& moved : stage.parameters) {
      values_of(stage, moved).copy_(moved.parameter);
    }
  }
  for (StageMemory& stage : stages_) {
    std::map<const void*, Tensor> shells;  // by the storage before
    for (Moved& moved : stage.parameters) {
      Tensor& p = moved.parameter;
      if (p.device() == device_) continue;
      // Parameters that shared a storage share the new one.
      Tensor& shell = shells[storage_of(p)];
      if (!shell.defined()) shell = without_memory(p, device_);
      p.set_data(shell.as_strided(p.sizes(), p.strides(), p.storage_offset()));
    }
    set_memory(stage, {});
  }
  on_host_ = true;
  return true;
}

void HostParameters::move_to_device() {
  if (!on_host_) return;
  const torch::NoGradGuard no_grad;
  const Readable readable(this);
  std::vector<std::vector<Tensor>> values;  // by stage and parameter
  for (StageMemory& stage : stages_) {
    auto& list = values.emplace_back();
    std::map<int64_t, Tensor> storages;  // by place
    for (const Moved& moved : stage.parameters) {
      Tensor& storage = storages[moved.place];
      if (!storage.defined()) {
        storage =
            stage.block.narrow(0, moved.place, storage_bytes_of(moved.shell))
                .to(device_, /*non_blocking=*/false, /*copy=*/true);
      }
      list.push_back(view_in(storage, 0, moved.shell));
    }
  }
  for (size_t i = 0; i < stages_.size(); ++i) {
    for (size_t k = 0; k < values[i].size(); ++k) {
      Moved& moved = stages_[i].parameters[k];
      moved.shell = values[i][k];
    }
  }
  on_host_ = false;  // the end of `readable` sets the shells
}

void HostParameters::start_fetch(size_t unit, bool gradients) {
  StageMemory& stage = stages_[unit];
  if (stage.bytes == 0) return;
  const auto options = torch::TensorOptions(torch::kByte).device(device_);
  std::vector<HostTensors::Copy> copies;
  Tensor values, sums;
  if (!stage.values.defined()) {
    values = torch::empty({stage.bytes}, options);
    copies.push_back({address_of(values), address_of(stage.block),
                      static_cast<size_t>(stage.bytes)});
  }
  std::vector<Moved*> fetched;
  for (Moved& moved : stage.parameters) {
    if (gradients && moved.gradient) fetched.push_back(&moved);
  }
  if (!fetched.empty()) {
    sums = torch::empty({stage.gradient_bytes}, options);
    for (const Moved* moved : fetched) {
      const Tensor from = gradient_of(stage, *moved);
      copies.push_back({address_of(sums) + (address_of(from) -
                                            address_of(stage.gradient_block)),
                        address_of(from), from.nbytes()});
    }
  }
  if (copies.empty()) return;
  // Copies that have not been waited for end before these.
  stage.fetched = memory_->start(copies, Direction::kToDevice, nullptr);
  if (values.defined()) {
    stage.values = values;
    set_memory(stage, values);
    for (Moved& moved : stage.parameters) {
      moved.version = moved.parameter._version();
    }
  }
  for (Moved* moved : fetched) {
    moved->parameter.mutable_grad() =
        view_in(sums, moved->gradient_place, moved->parameter);
    moved->gradient = false;
    moved->fetched = true;
  }
}

void HostParameters::finish_fetch(size_t unit) {
  StageMemory& stage = stages_[unit];
  if (!stage.fetched) return;
  memory_->wait(*stage.fetched);
  stage.fetched.reset();
}

void HostParameters::leave(size_t unit) {
  StageMemory& stage = stages_[unit];
  if (!stage.values.defined()) return;
  finish_fetch(unit);
  const torch::NoGradGuard no_grad;
  std::vector<HostTensors::Copy> copies;
  Leaving left;
  bool updated = false;
  for (Moved& moved : stage.parameters) {
    Tensor& p = moved.parameter;
    updated = updated || p._version() != moved.version;
    moved.fetched = false;
    Tensor gradient = std::exchange(p.mutable_grad(), {});
    if (!gradient.defined() || !running()) continue;
    check_gradients_reserved();
    const Tensor to = gradient_of(stage, moved);
    if (gradient.strides() != p.strides()) {
      gradient =
          torch::empty_strided(p.sizes(), p.strides(), gradient.options())
              .copy_(gradient);
    }
    copies.push_back({address_of(to), address_of(gradient), to.nbytes()});
    left.tensors.push_back(gradient);
    moved.gradient = true;
  }
  if (updated) {
    copies.push_back({address_of(stage.block), address_of(stage.values),
                      static_cast<size_t>(stage.bytes)});
    left.tensors.push_back(stage.values);
  }
  set_memory(stage, {});
  stage.values.reset();
  if (copies.empty()) return;
  {
    const auto inside =
        updated && lane() != nullptr ? lane()->enter() : nullptr;
    left.end = memory_->start(copies, Direction::kToHost, nullptr);
  }
  leaving_.push_back(std::move(left));
}

bool HostParameters::reserve_gradients() {
  int64_t total = 0;
  for (const StageMemory& stage : stages_) {
    if (stage.gradient_block.defined()) return true;
    total += stage.gradient_bytes;
  }
  const Tensor all = memory_->allocate(total);
  if (!all.defined()) return false;
  int64_t place = 0;
  for (StageMemory& stage : stages_) {
    stage.gradient_block = all.narrow(0, place, stage.gradient_bytes);
    place += stage.gradient_bytes;
  }
  return true;
}

void HostParameters::release_gradients() {
  for (const StageMemory& stage : stages_) {
    for (const Moved& moved : stage.parameters) {
      if (moved.gradient) return;
    }
  }
  for (StageMemory& stage : stages_) stage.gradient_block.reset();
}

void HostParameters::check_gradients_reserved() {
  TORCH_CHECK_WITH(OutOfMemoryError, reserve_gradients(),
                   "the host gives no memory for gradients");
}

void HostParameters::wait_for_left(size_t remaining) {
  while (leaving_.size() > remaining) {
    memory_->wait(*leaving_.front().end);
    leaving_.pop_front();
  }
}

bool HostParameters::is_updated(const StageMemory& stage) {
  return std::any_of(stage.parameters.begin(), stage.parameters.end(),
                     [](const Moved& moved) {
                       return moved.parameter._version() != moved.version;
                     });
}

void HostParameters::abandon() {
  if (!on_host_) return;
  for (size_t unit = 0; unit < stages_.size(); ++unit) {
    StageMemory& stage = stages_[unit];
    if (!stage.values.defined()) continue;
    if (is_updated(stage)) {  // its gradients were freed
      leave(unit);
      continue;
    }
    finish_fetch(unit);
    set_memory(stage, {});
    stage.values.reset();
    for (Moved& moved : stage.parameters) {
      if (!std::exchange(moved.fetched, false)) continue;
      // The host still has those of the micro-batches before.
      moved.parameter.mutable_grad().reset();
      moved.gradient = true;
    }
  }
  stop();
  wait_for_left(0);
}

void HostParameters::forget_gradients() {
  for (StageMemory& stage : stages_) {
    for (Moved& moved : stage.parameters) moved.gradient = false;
  }
}

void HostParameters::open() {
  if (readable_ > 0) {
    ++readable_;
    return;
  }
  abandon();  // between micro-batches nothing but unchanged parameters is there
  memory_->synchronize();
  ++readable_;
  const torch::NoGradGuard no_grad;
  for (StageMemory& stage : stages_) {
    for (Moved& moved : stage.parameters) {
      Tensor& p = moved.parameter;
      const Tensor values = values_of(stage, moved);
      const Tensor gradient =
          moved.gradient ? gradient_of(stage, moved) : Tensor();
      moved.shell = p.detach();
      p.set_data(values);
      p.mutable_grad() = gradient;
    }
  }
}

void HostParameters::close() {
  if (--readable_ > 0) return;
  const torch::NoGradGuard no_grad;
  for (StageMemory& stage : stages_) {
    for (Moved& moved : stage.parameters) {
      Tensor& p = moved.parameter;
      const Tensor gradient = std::exchange(p.mutable_grad(), {});
      p.set_data(std::exchange(moved.shell, {}));
      if (!on_host_) {  // moved to the device meanwhile
        if (gradient.defined()) p.mutable_grad() = gradient.to(device_);
        moved.gradient = false;
        continue;
      }
      moved.gradient = gradient.defined() && reserve_gradients();
      if (gradient.defined() && !moved.gradient) {
        TORCH_WARN(
            "[HostParameters] no host memory for gradients: they are lost");
      }
      if (!moved.gradient) continue;
      const Tensor kept = gradient_of(stage, moved);
      if (kept.data_ptr() != gradient.data_ptr()) kept.copy_(gradient);
    }
    if (!on_host_) {
      stage.block.reset();
      stage.gradient_block.reset();
    }
  }
}

HostParameters::Readable::Readable(HostParameters* host)
    : host_(host != nullptr && host->on_host_ ? host : nullptr) {
  if (host_ != nullptr) host_->open();
}

HostParameters::Readable::~Readable() {
  if (host_ != nullptr) host_->close();
}

}  // namespace reprise::detail
