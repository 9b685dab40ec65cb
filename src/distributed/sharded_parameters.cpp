// Tested by tests/distributed/sharded_parameters_test.cpp.
#include "distributed/sharded_parameters.h"

#include <reprise/memory/meter.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <thread>
#include <utility>

namespace reprise::detail {

using torch::Tensor;

/// Parameters in units, and the units of each stage.
struct ShardedParameters::Plan {
  std::vector<GradientReducer::Parameter> parameters;
  std::vector<std::vector<size_t>> units_of_stage;

  Plan(const Chain& chain, const NamedList& named, const Options& options) {
    std::set<const void*> halved;
    for (const Tensor& parameter : options.halved) {
      if (parameter.scalar_type() == torch::kFloat) {
        halved.insert(parameter.unsafeGetTensorImpl());
      }
    }
    std::map<const void*, std::set<int>> stages_of;
    for (int i = 0; i < chain.size(); ++i) {
      for (const auto& module : chain[i].modules()) {
        for (const Tensor& parameter : module->parameters()) {
          stages_of[parameter.unsafeGetTensorImpl()].insert(i);
        }
      }
    }
    units_of_stage.resize(static_cast<size_t>(chain.size()));
    std::map<std::set<int>, int> units;
    std::set<const void*> seen;
    for (const auto& [name, parameter] : named) {
      const void* key = parameter.unsafeGetTensorImpl();
      if (!seen.insert(key).second) continue;
      std::set<int> stages = stages_of[key];
      if (stages.empty()) stages.insert(0);  // read by no stage
      const auto [unit, added] =
          units.emplace(stages, static_cast<int>(units.size()));
      for (const int stage : stages) {
        if (!added) break;
        units_of_stage[static_cast<size_t>(stage)].push_back(
            static_cast<size_t>(unit->second));
      }
      parameters.push_back({name, parameter, *stages.begin(), unit->second,
                            halved.count(key) > 0});
    }
  }
};

ShardedParameters::ShardedParameters(std::shared_ptr<RankGroup> group,
                                     const Chain& chain,
                                     const NamedList& parameters,
                                     torch::Device device,
                                     const Options& options)
    : ShardedParameters(std::move(group), Plan(chain, parameters, options),
                        device, options) {}

ShardedParameters::ShardedParameters(std::shared_ptr<RankGroup> group,
                                     Plan plan, torch::Device device,
                                     const Options& options)
    : StageParameters(plan.units_of_stage),
      group_(std::move(group)),
      units_(units()),
      half_(options.half),
      stages_(static_cast<int>(plan.units_of_stage.size())) {
  const torch::NoGradGuard no_grad;
  // Each has a storage of its own, and the layout the device.
  for (auto& parameter : plan.parameters) {
    Tensor& p = parameter.tensor;
    TORCH_CHECK(p.is_non_overlapping_and_dense(),
                "[--shard] parameters: expected dense parameters, got '",
                parameter.name, "' with strides ", p.strides());
    if (p.device() != device) p.set_data(p.detach().to(device));
  }
  BucketRules rules{.bucket_bytes = options.bucket_bytes,
                    .divisor = group_->size(),
                    .by_unit = true};
  trained_ = std::make_shared<ParameterShards>(
      group_, std::make_shared<const BucketLayout>(plan.parameters, rules),
      /*own=*/true);
  add_buckets(trained_);
  rules.frozen = true;
  auto frozen = std::make_shared<const BucketLayout>(plan.parameters, rules);
  if (!frozen->entries().empty()) {
    frozen_ = std::make_shared<ParameterShards>(group_, std::move(frozen),
                                                /*own=*/true);
    add_buckets(frozen_);
  }
  for (auto& parameter : plan.parameters) {
    Tensor& p = parameter.tensor;
    const Tensor alone = torch::empty({0}, p.options());
    const int64_t bytes = static_cast<int64_t>(p.nbytes());
    alone.storage().unsafeGetStorageImpl()->set_nbytes(
        static_cast<size_t>(bytes));
    set_storage_memory(alone, nullptr);
    p.set_data(alone.as_strided(p.sizes(), p.strides(), 0));
  }
  for (const auto& stage : plan.units_of_stage) {
    int64_t bytes = 0, wire = 0;
    for (const size_t unit : stage) {
      for (const Bucket& bucket : units_[unit].buckets) {
        const auto& range = bucket.shards->layout()->buckets()[bucket.index];
        bytes += allocated_bytes(range.bytes(), device);
        wire += wire_bytes(range);
      }
    }
    stage_bytes_.push_back(bytes);
    stage_wire_bytes_.push_back(wire);
  }
}

void ShardedParameters::add_buckets(
    const std::shared_ptr<ParameterShards>& shards) {
  const BucketLayout& layout = *shards->layout();
  for (size_t b = 0; b < layout.buckets().size(); ++b) {
    const auto& first = layout.entries()[layout.buckets()[b].first];
    units_[static_cast<size_t>(first.parameter.unit)].buckets.push_back(
        {shards, b});
  }
}

ShardedParameters::~ShardedParameters() {
  const torch::NoGradGuard no_grad;
  for (const Unit& unit : units_) {
    for (const Bucket& bucket : unit.buckets) {
      for (const auto& entry : bucket.shards->layout()->entries()) {
        Tensor parameter = entry.parameter.tensor;
        if (parameter.defined() && parameter.numel() > 0 &&
            parameter.storage().data() == nullptr) {
          parameter.set_data(torch::empty({0}, parameter.options()));
        }
      }
    }
  }
}

bool ShardedParameters::travels_halved(
    const BucketLayout::Bucket& range) const {
  return range.halved && half_ != torch::kFloat;
}

int64_t ShardedParameters::wire_bytes(const BucketLayout::Bucket& range) const {
  return travels_halved(range) ? range.bytes() / 2 : range.bytes();
}

int64_t ShardedParameters::wire_bytes() const {
  int64_t bytes = 0;
  for (const Unit& unit : units_) {
    for (const Bucket& bucket : unit.buckets) {
      bytes += wire_bytes(bucket.shards->layout()->buckets()[bucket.index]);
    }
  }
  return bytes;
}

int64_t ShardedParameters::own_bytes() const {
  int64_t bytes = 0;
  for (const Unit& unit : units_) {
    for (const Bucket& bucket : unit.buckets) {
      bytes +=
          static_cast<int64_t>(bucket.shards->share(bucket.index).nbytes());
    }
  }
  return bytes;
}

void ShardedParameters::set_memory(const Bucket& bucket) {
  const BucketLayout& layout = *bucket.shards->layout();
  const auto& range = layout.buckets()[bucket.index];
  for (size_t i = range.first; i < range.first + range.count; ++i) {
    const auto& entry = layout.entries()[i];
    char* data = nullptr;
    if (bucket.values.defined()) {
      data = static_cast<char*>(bucket.values.data_ptr()) +
             entry.offset * range.element_bytes;
    }
    set_storage_memory(entry.parameter.tensor, data);
  }
}

namespace {

/// Converts values in `type`, which are in the second half of the memory of `values`, in place:
/// at each step as many as there is room for before those that are left.
void widen(const Tensor& values, torch::ScalarType type) {
  constexpr int64_t kFew = 1 << 14;
  const torch::NoGradGuard no_grad;
  const int64_t n = values.numel();
  const Tensor narrow = values.view(type).narrow(0, n, n);
  int64_t done = 0;
  while (n - done > kFew) {
    const int64_t count = (n - done) / 2;
    values.narrow(0, done, count).copy_(narrow.narrow(0, done, count));
    done += count;
  }
  const Tensor rest = narrow.narrow(0, done, n - done).clone();
  values.narrow(0, done, n - done).copy_(rest);
}

}  // namespace

void ShardedParameters::gather(Bucket& bucket) {
  const auto& range = bucket.shards->layout()->buckets()[bucket.index];
  const Tensor& share = bucket.shards->share(bucket.index);
  bucket.narrow = travels_halved(range);
  const Tensor target = bucket.narrow ? bucket.values.view(half_).narrow(
                                            0, range.padded, range.padded)
                                      : bucket.values;
  const Tensor shares = target.view({group_->size(), -1});
  if (alone_) {
    shares.copy_(share.view({1, -1}));
    const auto now = std::chrono::steady_clock::now();
    const std::chrono::duration<double, std::milli> takes(
        network_.gather_ms(wire_bytes(range), group_->size()));
    // One after the other.
    lane_free_ = std::max(lane_free_, now) +
                 std::chrono::duration_cast<std::chrono::nanoseconds>(takes);
    bucket.arrives = lane_free_;
    return;
  }
  const Tensor own = shares[group_->rank()];
  own.copy_(share);
  bucket.work = group_->all_gather(target, own, RankGroup::Lane::kParameters);
  ++counters_.calls;
  counters_.bytes += wire_bytes(range);
}

void ShardedParameters::start_fetch(size_t index, bool /*backward*/) {
  Unit& unit = units_[index];
  if (unit.present) return;
  const torch::NoGradGuard no_grad;
  // Nothing may fail between two collectives.
  for (Bucket& bucket : unit.buckets) {
    const auto& range = bucket.shards->layout()->buckets()[bucket.index];
    if (!bucket.values.defined()) {
      bucket.values = torch::empty({range.padded}, range.options);
    }
  }
  for (Bucket& bucket : unit.buckets) gather(bucket);
  unit.present = true;
  if (!computes_) return finish_fetch(index);
  for (const Bucket& bucket : unit.buckets) set_memory(bucket);
}

void ShardedParameters::finish_fetch(size_t index) {
  const auto begin = std::chrono::steady_clock::now();
  for (Bucket& bucket : units_[index].buckets) {
    if (alone_) std::this_thread::sleep_until(bucket.arrives);
    if (!bucket.work.valid()) continue;
    group_->wait(bucket.work);
    bucket.work = {};
  }
  for (Bucket& bucket : units_[index].buckets) {
    if (std::exchange(bucket.narrow, false) && computes_) {
      widen(bucket.values, half_);
    }
  }
  counters_.wait_s +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
          .count();
  if (!computes_) free_memory(units_[index]);
}

void ShardedParameters::free_memory(Unit& unit) {
  for (Bucket& bucket : unit.buckets) {
    // Threads of the backend may still refer to the tensor.
    if (bucket.values.defined()) set_storage_memory(bucket.values, nullptr);
    bucket.values.reset();
    set_memory(bucket);
  }
}

void ShardedParameters::leave(size_t index) {
  Unit& unit = units_[index];
  if (!unit.present) return;
  finish_fetch(index);
  free_memory(unit);
  unit.present = false;
}

void ShardedParameters::abandon() {
  const bool interrupted = running();
  for (size_t i = 0; i < units_.size(); ++i) {
    finish_fetch(i);
    free_memory(units_[i]);
    // The other ranks count on what was gathered for the visits that follow.
    if (!interrupted) units_[i].present = false;
  }
  brought_ = -1;
  stop();
}

void ShardedParameters::finish_without_computing(
    const std::function<void(const StageVisit&)>& after) {
  computes_ = false;
  if (const StageVisit* interrupted = last_visit()) after(*interrupted);
  while (visits_left() > 0) {
    advance();
    after(*last_visit());
  }
  for (size_t i = 0; i < units_.size(); ++i) leave(i);
  computes_ = true;
}

void ShardedParameters::finish_forward_without_computing() {
  computes_ = false;
  for (int stage = brought_ + 1; stage < stages_; ++stage) bring(stage);
  computes_ = true;
  abandon();
}

void ShardedParameters::brought(int stage) {
  brought_ = stage;
}

ShardedParameters::Alone::Alone(ShardedParameters& parameters)
    : parameters_(parameters) {
  parameters_.abandon();
  parameters_.alone_ = true;
}

ShardedParameters::Alone::~Alone() {
  parameters_.abandon();
  for (Unit& unit : parameters_.units_) unit.present = false;
  parameters_.alone_ = false;
}

std::vector<Tensor> ShardedParameters::held() const {
  std::vector<Tensor> list;
  for (const Unit& unit : units_) {
    for (const Bucket& bucket : unit.buckets) {
      list.push_back(bucket.shards->share(bucket.index));
      if (bucket.values.defined()) list.push_back(bucket.values);
    }
  }
  return list;
}

ShardedParameters::NamedList ShardedParameters::gather_all() {
  abandon();
  NamedList all = trained_->gather_parameters();
  if (frozen_) {
    for (auto& item : frozen_->gather_parameters()) {
      all.push_back(std::move(item));
    }
  }
  return all;
}

std::vector<ParameterShards::Piece> ShardedParameters::pieces() const {
  auto list = trained_->pieces({}, "");
  if (frozen_) {
    for (auto& piece : frozen_->pieces({}, ""))
      list.push_back(std::move(piece));
  }
  return list;
}

void ShardedParameters::load(const NamedList& full) {
  abandon();
  trained_->load(full);
  if (frozen_) frozen_->load(full);
}

ShardedParameters::Readable::Readable(ShardedParameters* parameters)
    : parameters_(parameters) {
  if (parameters_ == nullptr) return;
  const torch::NoGradGuard no_grad;
  const NamedList list = parameters_->gather_all();
  const std::map<std::string, Tensor> by_name(list.begin(), list.end());
  for (const auto& shards : {parameters_->trained_, parameters_->frozen_}) {
    if (!shards) continue;
    for (const auto& entry : shards->layout()->entries()) {
      const auto found = by_name.find(entry.parameter.name);
      if (found == by_name.end()) continue;
      Tensor parameter = entry.parameter.tensor;
      shells_.emplace_back(parameter, parameter.detach());
      parameter.set_data(found->second);
    }
  }
}

ShardedParameters::Readable::~Readable() {
  const torch::NoGradGuard no_grad;
  for (auto& [parameter, shell] : shells_) parameter.set_data(shell);
}

}  // namespace reprise::detail
