#include "train/budget/training_costs.h"

#include "accumulate/small_gradients.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/paths.h"
#include "base/text_check.h"
#include "compat/cuda.h"
#include "compat/cuda_graph.h"
#include "compat/side_stream.h"
#include "data/batch_check.h"
#include "plan/evaluator.h"
#include "train/budget/host_offers.h"
#include "train/budget/model_state_guard.h"
#include "train/config/update_refusal.h"
#include "train/step/micro_step.h"
#include "train/store/metrics.h"

#include <reprise/base/error.h>
#include <reprise/memory/meter.h>
#include <reprise/train/fields.h>
#include <reprise/version.h>

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>

namespace reprise::detail {
namespace {

namespace fs = std::filesystem;

// Version of cached measurements. Increase it when the method of measurement
// changes.
constexpr int kFormat = 28;

int64_t bytes_on(const torch::Tensor& tensor, torch::Device device) {
  if (!tensor.defined() || tensor.device() != device) return 0;
  return allocated_bytes(static_cast<int64_t>(tensor.nbytes()), device);
}

/// Types and shapes of the tensors of one sample, which datasets of the same name may
/// return in several ways.
std::string shape_text(const Dataset& data) {
  std::string text;
  for (const auto& tensor : largest_batch(data, 1).tensors) {
    text += fmt::format("{}{} ", c10::toString(tensor.scalar_type()),
                        c10::str(tensor.sizes()));
  }
  return text;
}

}  // namespace

TrainingCosts::TrainingCosts(TrainSetup setup, Options options)
    : setup_(std::move(setup)), options_(std::move(options)) {}

const CostProfile& TrainingCosts::profile(Precision precision) {
  const auto stream = trained_stream();
  return entry(precision);
}

GraphMode TrainingCosts::graph() const {
  const TrainOptions& config = setup_.options;
  const bool waits = config.sync_norm && config.ranks > 1;
  const bool can = setup_.device.is_cuda() && !waits &&
                   compat::cuda_graph_unavailable_reason().empty();
  return can ? config.graph : GraphMode::kOff;
}

compat::GraphStreamScope TrainingCosts::trained_stream() const {
  return {setup_.device, graph() != GraphMode::kOff};
}

CostProfile& TrainingCosts::entry(Precision precision) {
  const auto found = profiles_.find(precision);
  if (found != profiles_.end()) return found->second;
  // Complete the profile before storing it, because memory may run out.
  CostProfile profile;
  profile.key = key_of(precision);
  profile.precision = precision;
  load_kept(profile);
  if (profile.stages.empty()) {
    measure_fixed(profile);
    reuse_steps(profile);
  }
  profile.update = update(profile);
  profile.exchange = setup_.exchange;
  profile.exchange_of_graph = setup_.exchange_of_graph;
  return profiles_.emplace(precision, std::move(profile)).first->second;
}

bool TrainingCosts::measure(Precision precision, int64_t micro_batch) {
  const auto stream = trained_stream();
  CostProfile& profile = entry(precision);
  if (profile.measured(micro_batch)) return true;
  if (reuse_step(profile, micro_batch)) return true;
  say(fmt::format("measuring a micro-batch of {} in {}", micro_batch,
                  to_text(precision)));
  place_parameters();
  try {
    const bool first = profile.sizes.empty();
    SizeCosts size = measure_size(precision, micro_batch);
    if (first) measure_workspace(profile, size);
    if (!options_.memory_only) measure_factors(profile, size);
    profile.add(std::move(size));
  } catch (const c10::Error& error) {
    if (!is_out_of_memory(error)) throw;
    if (setup_.device.is_cuda()) compat::empty_cuda_cache();
    return false;
  }
  if (!options_.memory_only) keep(profile);
  return true;
}

std::optional<double> TrainingCosts::try_plan(const Plan& plan) {
  const auto stream = trained_stream();
  CostProfile& profile = entry(plan.precision);
  const int64_t micro_batch = plan.micro_batch;
  const std::string text = plan.schedule.to_text();
  const UpdateMode update =
      timed_update(profile, plan.update, micro_batch, plan.global_batch);
  const auto known = profile.tried_ms(micro_batch, text, plan.graph, update);
  if (known || options_.memory_only) return known;
  say(fmt::format("trying a micro-batch of {} in {}", micro_batch,
                  to_text(plan.precision)));
  const auto trial = run_schedule(profile, profile.at(micro_batch),
                                  plan.schedule, mode_of(plan, update), {});
  if (!trial) return std::nullopt;
  TriedSchedule tried{micro_batch,      text,   trial->ms,         plan.graph,
                      /*comparison=*/0, update, trial->extra_bytes};
  if (update != plan.update) measure_last_update(profile, plan, tried);
  profile.add(std::move(tried));
  keep(profile);
  return trial->ms;
}

std::string TrainingCosts::key_of(Precision precision) const {
  // Gathers depend on the network of the day.
  if (setup_.model.cost_key.empty() || setup_.own_optimizer || setup_.sharded) {
    return "";
  }
  // Normalize options that do not affect costs, so that they share an entry.
  TrainOptions options = setup_.options;
  options.precision = precision;
  if (options.ranks == 1) options.sync_norm = false;
  if (options.state == StatePlace::kAuto) options.state = StatePlace::kDevice;
  if (options.shard == Sharding::kNone && !options.sync_norm) options.ranks = 1;
  if (options.tf32) options.fp32_products = MatrixProducts::kLibrary;
  size_t variants = 0;
  for (int i = 0; i < setup_.model.chain.size(); ++i) {
    variants += setup_.model.chain[i].variants().size();
  }
  return fmt::format(
      "{} {} | {} | data {} {}bytes {} | variants {} | host {} | {} threads "
      "{} | LibTorch {}",
      kFormat, setup_.model.cost_key, option_fields().cost_key(options),
      setup_.data.name, shape_text(*setup_.data.train), setup_.dataset_bytes,
      variants, state() == StatePlace::kHost ? host_share() : 1,
      setup_.device.is_cuda() ? compat::cuda_device_name(setup_.device.index())
                              : "cpu",
      at::get_num_threads(), libtorch_version());
}

std::unique_ptr<WeightCopies> TrainingCosts::copies(Precision precision) const {
  return weight_copies_of(setup_, precision);
}

std::vector<std::string> TrainingCosts::stage_names() const {
  std::vector<std::string> names;
  for (int i = 0; i < setup_.model.chain.size(); ++i) {
    names.push_back(setup_.model.chain[i].name());
  }
  return names;
}

void TrainingCosts::measure_fixed(CostProfile& profile) {
  place_parameters();
  const Chain& chain = setup_.model.chain;
  const auto n = static_cast<size_t>(chain.size());
  profile.gradient_bytes.assign(n, 0);
  profile.held_twice_bytes.assign(n, 0);
  profile.stage_parameter_bytes.assign(n, 0);
  profile.stage_wire_bytes.assign(n, 0);
  std::set<const void*> halved;
  if (profile.precision != Precision::kFp32) {
    for (const auto& p : weights_read_in_half(setup_.model)) {
      halved.insert(p.unsafeGetTensorImpl());
    }
  }
  profile.stages = stage_names();
  profile.graph = graph();
  profile.half_gradients = setup_.options.gradients == GradientSums::kBf16;
  std::map<const void*, int> uses;
  for (int i = 0; i < chain.size(); ++i) {
    std::set<const void*> here;
    for (const auto& module : chain[i].modules()) {
      for (const auto& p : module->parameters()) {
        if (!here.insert(p.unsafeGetTensorImpl()).second) continue;
        const auto bytes = static_cast<int64_t>(p.nbytes());
        profile.stage_parameter_bytes[static_cast<size_t>(i)] += bytes;
        profile.stage_wire_bytes[static_cast<size_t>(i)] +=
            halved.count(p.unsafeGetTensorImpl()) > 0 ? bytes / 2 : bytes;
      }
    }
    for (const void* p : here) ++uses[p];
  }
  auto made = copies(profile.precision);
  std::set<const void*> small;
  for (const auto& p :
       MicroStep::small_of(setup_.device, setup_.parameter_list, made.get())) {
    small.insert(p.unsafeGetTensorImpl());
  }
  // The last stage that uses a parameter is the first to compute its gradient.
  std::set<const void*> seen;
  for (int i = chain.size(); i-- > 0;) {
    for (const auto& module : chain[i].modules()) {
      for (const auto& p : module->parameters()) {
        const void* key = p.unsafeGetTensorImpl();
        if (!p.requires_grad() || !seen.insert(key).second) continue;
        const int64_t bytes = gradient_bytes(setup_, p);
        profile.gradient_bytes[static_cast<size_t>(i)] += bytes;
        if (uses[key] > 1 || small.contains(key)) {
          profile.held_twice_bytes[static_cast<size_t>(i)] += bytes;
        }
      }
    }
  }
  if (setup_.sharded) profile.fixed.parameters = setup_.sharded->own_bytes();
  for (const auto& p : setup_.model.root->parameters()) {
    const int64_t bytes = bytes_on(p, setup_.device);
    if (!setup_.sharded) profile.fixed.parameters += bytes;
    if (!p.requires_grad()) continue;
    const bool half =
        profile.half_gradients && p.scalar_type() == torch::kFloat;
    profile.fixed.gradients +=
        half ? allocated_bytes(p.numel() * 2, setup_.device)
             : gradient_bytes(setup_, p);
  }
  // A training has a snapshot of the buffers at the start of a window, and if it may update in
  // the backward, one of those at the start of the micro-batch.
  const bool may_update_in_backward =
      setup_.options.update != UpdateMode::kAfter &&
      update_refusal(setup_.options).empty();
  for (const auto& b : setup_.model.root->buffers()) {
    profile.fixed.parameters +=
        (may_update_in_backward ? 3 : 2) * bytes_on(b, setup_.device);
  }
  if (made) {
    for (const auto& copy : made->copies()) {
      profile.fixed.parameters += bytes_on(copy, setup_.device);
    }
  }
  made.reset();
  separate_moved(profile);
  measure_update(profile);
  if (moves_parameters()) {
    const LinkSpeed speed = link();
    profile.to_device_bytes_per_ms = speed.to_device;
    profile.to_host_bytes_per_ms = speed.to_host;
  }
  if (profile.updates_in_last()) profile.graph = GraphMode::kOff;
}

void TrainingCosts::reuse_steps(CostProfile& profile) const {
  if (options_.same_steps == nullptr) return;
  const auto& others = options_.same_steps->profiles_;
  const auto found = others.find(profile.precision);
  if (found == others.end()) return;
  profile.sizes = found->second.sizes;
  for (SizeCosts& size : profile.sizes) {
    limit_host_bytes(setup_, profile.host_state_bytes, size.chain_costs);
  }
  profile.fixed.workspace = found->second.fixed.workspace;
  for (const TriedSchedule& tried : found->second.tried) {
    if (tried.update == UpdateMode::kAfter) profile.add(tried);
  }
  if (!options_.memory_only) keep(profile);
}

bool TrainingCosts::reuse_step(CostProfile& profile,
                               int64_t micro_batch) const {
  if (options_.same_steps == nullptr || profile.sizes.empty()) return false;
  const auto& others = options_.same_steps->profiles_;
  const auto found = others.find(profile.precision);
  if (found == others.end() || !found->second.measured(micro_batch)) {
    return false;
  }
  SizeCosts size = found->second.at(micro_batch);
  limit_host_bytes(setup_, profile.host_state_bytes, size.chain_costs);
  profile.add(std::move(size));
  if (!options_.memory_only) keep(profile);
  return true;
}

size_t TrainingCosts::measurements() const {
  size_t count = 0;
  for (const auto& item : profiles_) count += item.second.sizes.size();
  return count;
}

int64_t TrainingCosts::held_by_training() const {
  return MicroStep::held_bytes(setup_.device) + Metrics::kDeviceBytes;
}

void TrainingCosts::measure_workspace(CostProfile& profile,
                                      const SizeCosts& size) {
  // Live memory between steps that is neither model, data nor specific to the
  // micro-batch size.
  const auto made = copies(profile.precision);
  const int64_t state = trial_optimizer_ ? bytes_held_by(*trial_optimizer_) : 0;
  const int64_t rest = live_bytes(setup_.device) - profile.fixed.parameters -
                       state - size.workspace_bytes -
                       size.graph_workspace_bytes;
  profile.fixed.workspace = std::max<int64_t>(0, rest) + held_by_training();
}

Batch TrainingCosts::make_batch(int64_t samples) const {
  return largest_batch(*setup_.data.train, samples);
}

int64_t TrainingCosts::bytes_of(const Batch& batch) const {
  int64_t bytes = 0;
  for (const auto& tensor : batch.tensors) {
    bytes += bytes_on(tensor, setup_.device);
  }
  return bytes;
}

bool TrainingCosts::workers_prepare() const {
  return setup_.device.is_cpu() &&
         setup_.options.resize == ResizePlace::kWorkers;
}

int64_t TrainingCosts::ahead_bytes(const Batch& raw,
                                   const Batch& prepared) const {
  if (setup_.device.is_cuda()) return 0;
  const int64_t bytes = bytes_of(workers_prepare() ? prepared : raw);
  if (!is_stream(*setup_.data.train)) return 2 * setup_.options.workers * bytes;
  // Whole windows are read ahead; see Loader.
  const int64_t batches =
      (setup_.options.share() + raw.samples - 1) / raw.samples;
  return (setup_.options.workers > 0 ? 2 : 1) * batches * bytes;
}

void TrainingCosts::release_workspaces() {
  compat::release_workspaces(setup_.device);
}

SizeCosts TrainingCosts::measure_size(Precision precision,
                                      int64_t micro_batch) {
  if (!setup_.device.is_cuda()) {
    return trace_size(precision, micro_batch);
  }
  // Exclude workspaces that libraries allocated for other sizes or earlier
  // work.
  const bool released = compat::release_workspaces(setup_.device);
  // A cached block of another size may be larger than a request.
  compat::empty_cuda_cache();
  // Memory that stays allocated after a run is a workspace that a library
  // allocated during a stage; it is not part of the stage. The run also warms
  // up the allocator, as in a training that has run for a while.
  const auto taken_by_a_run = [&] {
    const int64_t before = live_bytes(setup_.device);
    trace_size(precision, micro_batch, /*warm_up=*/true);
    return std::max<int64_t>(0, live_bytes(setup_.device) - before);
  };
  int64_t workspace_bytes = taken_by_a_run();
  int64_t graph_workspace_bytes = 0;
  if (graph() != GraphMode::kOff) {
    const compat::CaptureExpected capture(true);
    graph_workspace_bytes = taken_by_a_run();
  }
  if (!released) {
    // Existing workspaces that were reused cannot be distinguished from others.
    for (const SizeCosts& other : entry(precision).sizes) {
      workspace_bytes = std::max(workspace_bytes, other.workspace_bytes);
      graph_workspace_bytes =
          std::max(graph_workspace_bytes, other.graph_workspace_bytes);
    }
  }
  SizeCosts size = trace_size(precision, micro_batch);
  size.workspace_bytes = workspace_bytes;
  size.graph_workspace_bytes = graph_workspace_bytes;
  return size;
}

StageCostOptions TrainingCosts::tracing(const WeightCopies* copies) const {
  StageCostOptions options;
  const auto small =
      MicroStep::small_of(setup_.device, setup_.parameter_list, copies);
  if (!small.empty()) {
    options.around_backward = [small] {
      return std::make_shared<SmallGradients>(small);
    };
  }
  if (options_.memory_only) return options;
  // Short stages are repeated until the total is reached.
  options.repeats = 2;
  options.min_total_ms = 40;
  options.max_repeats = 15;
  return options;
}

SizeCosts TrainingCosts::trace_size(Precision precision, int64_t micro_batch,
                                    bool warm_up) {
  SizeCosts size;
  size.micro_batch = micro_batch;
  Batch batch;
  const MemoryMeter meter(setup_.device);
  const Batch raw = make_batch(micro_batch);
  const auto make_ready = [&] {
    batch = raw;
    move_to(batch, setup_.device);
    prepare_batch(setup_, batch);
  };
  make_ready();
  size.prepare_bytes = meter.peak_increase_bytes() + ahead_bytes(raw, batch);
  if (!options_.memory_only && setup_.options.resize == ResizePlace::kDevice) {
    size.other_ms = time_of(setup_.device, 3, make_ready);
  }
  size.data_bytes = bytes_of(batch) + ahead_bytes(raw, batch);
  if (workers_prepare()) {
    // Each worker may need this memory at any time.
    size.data_bytes += setup_.options.workers * meter.peak_increase_bytes();
    size.prepare_bytes += setup_.options.workers * meter.peak_increase_bytes();
  }
  const auto made = copies(precision);
  const compat::AutocastGuard autocast(autocast_of(precision, setup_.device));
  size.chain_costs =
      measure_stage_costs(setup_.model.chain, batch.tensors,
                          warm_up ? StageCostOptions{} : tracing(made.get()));
  limit_host_bytes(setup_, entry(precision).host_state_bytes, size.chain_costs);
  return size;
}

void TrainingCosts::say(const std::string& text) const {
  if (options_.progress) options_.progress(text);
}

std::string TrainingCosts::path_of(const CostProfile& profile) const {
  const std::string cache = cache_directory();
  if (cache.empty() || profile.key.empty()) return {};
  return fs::path(cache) / "profiles" /
         fmt::format("{:016x}.json", fnv1a(profile.key));
}

void TrainingCosts::load_kept(CostProfile& profile) const {
  if (options_.fresh || options_.memory_only) return;
  const std::string path = path_of(profile);
  std::error_code none;
  if (path.empty() || !fs::exists(path, none)) return;
  const auto unusable = [&](const std::string& reason) {
    say(fmt::format("{} is not usable ({}); the costs are measured again", path,
                    reason));
  };
  try {
    CostProfile kept = profile_from_json(read_text(path));
    // The chain may have been divided differently when this was written.
    if (kept.key == profile.key && kept.stages == stage_names()) {
      profile = std::move(kept);
      // The host may have less free memory now than when this was written.
      for (SizeCosts& size : profile.sizes) {
        limit_host_bytes(setup_, profile.host_state_bytes, size.chain_costs);
      }
    }
  } catch (const c10::Error& error) {
    unusable(without_origin(error.what_without_backtrace()));
  } catch (const Error& error) {
    unusable(without_origin(error.what()));
  }
}

void TrainingCosts::keep(const CostProfile& profile) const {
  const std::string path = path_of(profile);
  if (path.empty()) return;
  try {
    fs::create_directories(fs::path(path).parent_path());
    AtomicFile file(path);
    file.write(to_json(profile));
    file.commit();
  } catch (const std::exception& error) {
    say(fmt::format("the profile is not kept: {}", error.what()));
  }
}

}  // namespace reprise::detail
