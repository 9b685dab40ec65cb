#include "training_costs.h"

#include "session.h"

#include <reprise/data/file.h>
#include <reprise/memory/meter.h>
#include <reprise/recompute/execution.h>
#include <reprise/recompute/strategy.h>
#include <reprise/recompute/trace.h>
#include <reprise/torch/cuda.h>
#include <reprise/torch/out_of_memory.h>
#include <reprise/torch/version.h>
#include <reprise/train/optimizer.h>

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <utility>

namespace reprise::train_detail {
namespace {

namespace fs = std::filesystem;

// What the figures mean; changes when they are measured in another way.
constexpr int kFormat = 3;

/// Puts gradients, buffers, parameters and random generators back.
class Undisturbed {
 public:
  Undisturbed(const Model& model, torch::Device device, bool parameters) {
    const torch::NoGradGuard no_grad;
    const auto empty = torch::empty({0}, device);
    rng_ = compat::RngState::capture({empty});
    for (auto& parameter : model.root->parameters()) {
      gradients_.emplace_back(
          parameter, std::exchange(parameter.mutable_grad(), torch::Tensor()));
      // In the host's memory: the device may have no room for a copy.
      if (parameters) values_.emplace_back(parameter, to_host(parameter));
    }
    for (auto& buffer : model.root->buffers()) {
      values_.emplace_back(buffer, buffer.detach().clone());
    }
  }
  ~Undisturbed() {
    const torch::NoGradGuard no_grad;
    for (auto& [parameter, gradient] : gradients_) {
      parameter.mutable_grad() = gradient;
    }
    for (auto& [tensor, before] : values_) tensor.detach().copy_(before);
    rng_.restore();
  }
  Undisturbed(const Undisturbed&) = delete;
  Undisturbed& operator=(const Undisturbed&) = delete;

 private:
  static torch::Tensor to_host(const torch::Tensor& tensor) {
    return tensor.is_cuda() ? tensor.detach().cpu() : tensor.detach().clone();
  }
  using Pair = std::pair<torch::Tensor, torch::Tensor>;
  std::vector<Pair> gradients_;
  std::vector<Pair> values_;
  compat::RngState rng_;
};

void wait_for(torch::Device device) {
  if (device.is_cuda()) compat::cuda_synchronize(device.index());
}

/// Milliseconds that `work` takes, the device's part included: the median.
template <class Work>
double time_of(torch::Device device, int times, Work&& work) {
  std::vector<double> ms;
  for (int i = 0; i < times; ++i) {
    wait_for(device);
    const auto start = Clock::now();
    work();
    wait_for(device);
    ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start)
                     .count());
  }
  std::nth_element(ms.begin(), ms.begin() + times / 2, ms.end());
  return ms[static_cast<size_t>(times / 2)];
}

int64_t bytes_on(const torch::Tensor& tensor, torch::Device device) {
  if (!tensor.defined() || tensor.device() != device) return 0;
  return allocated_bytes(static_cast<int64_t>(tensor.nbytes()), device);
}

/// FNV-1a: a file's name from a key.
uint64_t hash_of(const std::string& text) {
  uint64_t hash = 14695981039346656037ULL;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  }
  return hash;
}

fs::path cache_folder() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  if (cache != nullptr && *cache != '\0') {
    return fs::path(cache) / "reprise" / "profiles";
  }
  if (home == nullptr || *home == '\0') return {};
  return fs::path(home) / ".cache" / "reprise" / "profiles";
}

}  // namespace

TrainingCosts::TrainingCosts(CostParts parts, Options options)
    : parts_(std::move(parts)), options_(std::move(options)) {}

const CostProfile& TrainingCosts::profile(const std::string& precision) {
  return entry(precision);
}

CostProfile& TrainingCosts::entry(const std::string& precision) {
  const auto found = profiles_.find(precision);
  if (found != profiles_.end()) return found->second;
  // Made whole before it is kept: memory may run out on the way.
  CostProfile profile;
  profile.key = key_of(precision);
  profile.precision = precision;
  load_kept(profile);
  if (profile.stages.empty()) measure_fixed(profile);
  return profiles_.emplace(precision, std::move(profile)).first->second;
}

bool TrainingCosts::measure(const std::string& precision, int64_t micro_batch) {
  CostProfile& profile = entry(precision);
  if (profile.measured(micro_batch)) return true;
  say(fmt::format("measuring a micro-batch of {} in {}", micro_batch,
                  precision));
  try {
    const bool first = profile.sizes.empty();
    SizeCosts size = measure_size(precision, micro_batch);
    if (first) measure_workspace(profile);
    if (!options_.memory_only) {
      const auto cut = measure_factor(profile, size, "all");
      const auto joined = measure_factor(profile, size, "none");
      size.cut_factor = cut.value_or(joined.value_or(1));
      size.joined_factor = joined.value_or(size.cut_factor);
    }
    profile.add(std::move(size));
  } catch (const c10::Error& error) {
    if (!compat::is_out_of_memory(error)) throw;
    if (parts_.device.is_cuda()) compat::empty_cuda_cache();
    return false;
  }
  if (!options_.memory_only) keep(profile);
  return true;
}

std::string TrainingCosts::key_of(const std::string& precision) const {
  const TrainConfig& c = parts_.config;
  const ModelOptions& m = parts_.model.options;
  const auto& o = c.optimizer;
  size_t variants = 0;
  for (int i = 0; i < parts_.model.chain.size(); ++i) {
    variants += parts_.model.chain[i].variants().size();
  }
  return fmt::format(
      "{} {} variants {} depth {} width {} heads {} classes {} vocab {} seq {} "
      "image {} "
      "channels {} norm {} dropout {} | {} | data {} {} workers {} resize {} | "
      "{} momentum {}{} | {} threads {} | LibTorch {}",
      kFormat, parts_.model.name, variants, m.depth, m.width, m.heads,
      m.classes, m.vocab, m.seq, m.image_size, m.channels, m.norm, m.dropout,
      precision, c.data, parts_.dataset_bytes, c.workers, c.resize, o.name,
      o.momentum, c.quantize_embeddings ? " quantized embeddings" : "",
      parts_.device.is_cuda() ? compat::cuda_device_name(parts_.device.index())
                              : "cpu",
      at::get_num_threads(), compat::libtorch_version());
}

std::vector<std::string> TrainingCosts::stage_names() const {
  std::vector<std::string> names;
  for (int i = 0; i < parts_.model.chain.size(); ++i) {
    names.push_back(parts_.model.chain[i].name());
  }
  return names;
}

void TrainingCosts::measure_fixed(CostProfile& profile) {
  const Chain& chain = parts_.model.chain;
  const auto n = static_cast<size_t>(chain.size());
  profile.gradient_bytes.assign(n, 0);
  profile.tied_bytes.assign(n, 0);
  profile.stages = stage_names();
  std::map<const void*, int> uses;
  for (int i = 0; i < chain.size(); ++i) {
    std::set<const void*> here;
    for (const auto& module : chain[i].modules()) {
      for (const auto& p : module->parameters()) {
        here.insert(p.unsafeGetTensorImpl());
      }
    }
    for (const void* p : here) ++uses[p];
  }
  // The last stage to use a parameter is the first to give it a gradient.
  std::set<const void*> seen;
  for (int i = chain.size(); i-- > 0;) {
    for (const auto& module : chain[i].modules()) {
      for (const auto& p : module->parameters()) {
        const void* key = p.unsafeGetTensorImpl();
        if (!p.requires_grad() || !seen.insert(key).second) continue;
        const int64_t bytes = bytes_on(p, parts_.device);
        profile.gradient_bytes[static_cast<size_t>(i)] += bytes;
        if (uses[key] > 1) profile.tied_bytes[static_cast<size_t>(i)] += bytes;
      }
    }
  }
  for (const auto& p : parts_.model.root->parameters()) {
    const int64_t bytes = bytes_on(p, parts_.device);
    profile.fixed.parameters += bytes;
    if (p.requires_grad()) profile.fixed.gradients += bytes;
  }
  for (const auto& b : parts_.model.root->buffers()) {
    profile.fixed.parameters += bytes_on(b, parts_.device);
  }
  profile.fixed.data = parts_.dataset_bytes;
  measure_update(profile);
}

void TrainingCosts::measure_update(CostProfile& profile) {
  const Undisturbed undisturbed(parts_.model, parts_.device,
                                /*parameters=*/true);
  for (const auto& [name, parameter] : parts_.parameters) {
    torch::Tensor p = parameter;
    p.mutable_grad() = torch::zeros_like(p);
  }
  const auto optimizer = optimizer_of(parts_.config, parts_.model);
  optimizer->step(0);
  for (const auto& tensor : optimizer->held()) {
    profile.fixed.optimizer += bytes_on(tensor, parts_.device);
  }
  const MemoryMeter meter(parts_.device);
  profile.update_ms = time_of(parts_.device, options_.memory_only ? 1 : 3,
                              [&] { optimizer->step(0); });
  profile.update_bytes = meter.peak_increase_bytes();
}

void TrainingCosts::measure_workspace(CostProfile& profile) {
  // All that is neither model nor data when nothing runs: what libraries took.
  const int64_t known = profile.fixed.parameters + profile.fixed.data;
  const int64_t live = live_bytes(parts_.device);
  profile.fixed.workspace = std::max<int64_t>(0, live - known);
}

Batch TrainingCosts::make_batch(int64_t samples) const {
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < samples; ++i) {
    indices.push_back(i % parts_.data->size());
  }
  return parts_.data->get(indices);
}

int64_t TrainingCosts::data_bytes(int64_t micro_batch,
                                  const Batch& prepared) const {
  int64_t bytes = bytes_on(prepared.inputs, parts_.device) +
                  bytes_on(prepared.targets, parts_.device);
  if (parts_.device.is_cuda()) return bytes;
  // On the CPU those that the workers have read ahead are there too.
  const bool large = parts_.config.resize == "workers";
  const Batch raw = large ? prepared : make_batch(micro_batch);
  const int64_t each = bytes_on(raw.inputs, parts_.device) +
                       bytes_on(raw.targets, parts_.device);
  return bytes + 2 * parts_.config.workers * each;
}

SizeCosts TrainingCosts::measure_size(const std::string& precision,
                                      int64_t micro_batch) {
  SizeCosts size;
  size.micro_batch = micro_batch;
  Batch batch;
  const Batch raw = make_batch(micro_batch);
  const auto prepare_batch = [&] {
    batch = raw;
    move_to(batch, parts_.device);
    prepare(batch, parts_.prepare);
  };
  prepare_batch();
  if (!options_.memory_only && parts_.config.resize == "device") {
    size.other_ms = time_of(parts_.device, 3, prepare_batch);
  }
  size.data_bytes = data_bytes(micro_batch, batch);
  TraceOptions tracing;
  if (!options_.memory_only) {
    tracing.repeats = parts_.device.is_cuda() ? 5 : 2;
    tracing.enough_ms = 40;
    tracing.most_repeats = 15;
  }
  const compat::AutocastGuard autocast(autocast_of(precision, parts_.device));
  size.figures =
      trace(parts_.model.chain, {batch.inputs, batch.targets}, tracing);
  return size;
}

std::optional<double> TrainingCosts::measure_factor(
    const CostProfile& profile, const SizeCosts& size,
    const std::string& strategy) {
  const Schedule schedule = make_schedule(strategy, parts_.model.chain.size());
  const Simulation simulation = simulate(schedule, size.figures);
  const int64_t peak =
      profile.fixed.total() + size.data_bytes + simulation.peak_bytes;
  if (options_.memory > 0 && peak > options_.memory) return std::nullopt;
  const Undisturbed undisturbed(parts_.model, parts_.device,
                                /*parameters=*/false);
  Execution execution(parts_.model.chain, schedule);
  const auto autocast = autocast_of(profile.precision, parts_.device);
  // Several in a row, so that the host can run ahead as it does in training.
  const bool cuda = parts_.device.is_cuda();
  const int in_a_row = cuda ? 3 : 1;
  try {
    Batch batch = make_batch(size.micro_batch);
    move_to(batch, parts_.device);
    prepare(batch, parts_.prepare);
    const auto step = [&] {
      Tensors outputs;
      {
        const compat::AutocastGuard guard(autocast);
        outputs = execution.forward({batch.inputs, batch.targets});
      }
      Tensors gradients(1);
      gradients[0] = torch::full_like(outputs[0], 1e-6);
      execution.backward(std::move(gradients));
    };
    // The caching allocator needs a few to find its blocks.
    for (int i = 0; i < (cuda ? 3 : 1); ++i) step();
    const double ms = time_of(parts_.device, 3, [&] {
      for (int i = 0; i < in_a_row; ++i) step();
    });
    return ms / in_a_row / simulation.time_ms;
  } catch (const c10::Error& error) {
    if (!compat::is_out_of_memory(error)) throw;
    return std::nullopt;  // another schedule may fit all the same
  }
}

void TrainingCosts::say(const std::string& text) const {
  if (options_.progress) options_.progress(text);
}

std::string TrainingCosts::path_of(const CostProfile& profile) const {
  const fs::path folder = cache_folder();
  if (folder.empty()) return {};
  return folder / fmt::format("{:016x}.json", hash_of(profile.key));
}

void TrainingCosts::load_kept(CostProfile& profile) const {
  if (options_.fresh || options_.memory_only) return;
  const std::string path = path_of(profile);
  std::error_code none;
  if (path.empty() || !fs::exists(path, none)) return;
  try {
    CostProfile kept = profile_from_json(read_text(path));
    // A chain may be divided in another way since.
    if (kept.key == profile.key && kept.stages == stage_names()) {
      profile = std::move(kept);
    }
  } catch (const c10::Error&) {
    // Written by another version, or not to be read: it is measured anew.
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

}  // namespace reprise::train_detail
