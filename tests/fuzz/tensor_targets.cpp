// Formats that have tensors: weights, indices of weights, adapters, states of runs, scripts.
#include "models/weight_files.h"
#include "target.h"
#include "train/store/state_files.h"

#include <reprise/data/safetensors.h>
#include <reprise/models/lora.h>
#include <reprise/models/model.h>
#include <reprise/models/script.h>
#include <reprise/train/config.h>

#include <filesystem>

namespace reprise::fuzz {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostRead = 8;  // tensors of a file

void run_safetensors(const std::string& path, const std::string&) {
  const SafeTensors file(path);
  size_t count = 0;
  for (const auto& [name, entry] : file.entries()) {
    if (++count > kMostRead) break;
    (void)file.read(name);
  }
}

void prepare_index(const std::string& folder) {
  write_safetensors(folder + "/one.safetensors",
                    {{"a", torch::ones({2, 3})}, {"b", torch::ones({4})}});
  write_safetensors(folder + "/two.safetensors", {{"c", torch::ones({2})}});
}

void run_index(const std::string& path, const std::string&) {
  const detail::WeightFiles files(path);
  for (const std::string& name : files.names()) (void)files.shape(name);
}

Model small_model() {
  return make_model("mlp", {.depth = 2, .width = 8, .image_size = 4});
}

/// The tensors of an adapter as one of the corpus describes it.
void prepare_adapter(const std::string& folder) {
  Model model = small_model();
  add_lora(model, {.rank = 4, .targets = "hidden0"});
  save_lora(model, folder);
}

void run_adapter(const std::string& path, const std::string&) {
  Model model = small_model();
  load_lora(model, fs::path(path).parent_path().string());
}

void run_state(const std::string& path, const std::string&) {
  static const RunDirectory directory = RunDirectory::create(
      fs::path(path).parent_path().string(), to_json(TrainConfig()));
  // Damaged states are set aside, and their number would grow.
  for (const auto& entry :
       fs::directory_iterator(fs::path(path).parent_path())) {
    if (entry.path().extension() == ".broken") fs::remove(entry.path());
  }
  const auto files = detail::StateFiles::newest(directory, report_refusal);
  if (!files) return;
  size_t count = 0;
  for (const auto& [name, shape] : files->tensors()) {
    if (++count > kMostRead) break;
    (void)files->read(name);
  }
}

void prepare_script(const std::string& folder) {
  write_safetensors(folder + "/weights.safetensors",
                    {{"a", torch::ones({2, 3})}});
}

void run_script(const std::string& path, const std::string&) {
  (void)load_script_model(fs::path(path).parent_path().string());
}

}  // namespace

std::vector<Target> tensor_targets() {
  const std::string state = "state-0000000003-000000.safetensors";
  return {
      {.name = "safetensors",
       .file = "fuzz.safetensors",
       .run = run_safetensors,
       .has_safetensors_header = true},
      {.name = "weight-index",
       .file = "model.safetensors.index.json",
       .run = run_index,
       .prepare = prepare_index},
      {.name = "adapter",
       .file = "adapter_config.json",
       .run = run_adapter,
       .prepare = prepare_adapter,
       // The configuration may be right, and its tensors are missing.
       .named = "reprise-fuzz-"},
      {.name = "state",
       .file = state,
       .run = run_state,
       .has_safetensors_header = true,
       .named = "state-0000000003-000000"},
      {.name = "script",
       .file = "model.json",
       .run = run_script,
       .prepare = prepare_script,
       .named = "reprise-fuzz-"},  // the folder, whose files a script names
  };
}

}  // namespace reprise::fuzz
