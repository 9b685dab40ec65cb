#pragma once

#include "models/script_twins.h"
#include "temporary.h"

#include <reprise/data/safetensors.h>
#include <reprise/models/script.h>

#include <nlohmann/json.hpp>

#include <fstream>
#include <map>
#include <string>

namespace reprise::testing {

/// A directory as split_model.py writes it, with the scripts of `twins`.
class ScriptDirectory {
 public:
  explicit ScriptDirectory(const Twins& twins) {
    model = {{"version", 1},
             {"name", "twin"},
             {"dtype", "float32"},
             {"inputs", 1},
             {"stages", nlohmann::json::array()}};
    for (size_t i = 0; i < twins.names.size(); ++i) {
      const bool loss = i + 1 == twins.names.size();
      add(twins.names[i], twins.scripts[i], loss ? 2 : 1);
    }
    write();
  }

  void add(const std::string& name, const torch::jit::Module& script,
           int inputs) {
    nlohmann::json names = nlohmann::json::object();
    for (const auto& item : script.named_parameters()) {
      names[item.name] = name + "." + item.name;
      weights[name + "." + item.name] = item.value;
    }
    for (const auto& item : script.named_buffers()) {
      names[item.name] = name + "." + item.name;
      weights[name + "." + item.name] = item.value;
    }
    script.save(folder / (name + ".pt"));
    model["stages"].push_back({{"name", name},
                               {"file", name + ".pt"},
                               {"inputs", inputs},
                               {"outputs", 1},
                               {"tensors", names}});
  }

  void write() const {
    std::ofstream(folder / "model.json") << model;
    write_safetensors(folder / "weights.safetensors",
                      NamedTensors(weights.begin(), weights.end()));
  }

  Model load() const { return load_script_model(folder.path()); }

  /// Writes the directory and returns the error of loading it.
  std::string problem() const {
    write();
    return error_of([&] { load(); });
  }

  TemporaryDirectory folder;
  nlohmann::json model;
  std::map<std::string, torch::Tensor> weights;
};

}  // namespace reprise::testing
