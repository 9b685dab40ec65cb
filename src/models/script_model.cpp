// Tested by tests/models/script_model_test.cpp.
#include "base/file.h"
#include "base/hash.h"
#include "base/json_text.h"
#include "base/text_check.h"
#include "models/script_tensors.h"

#include <reprise/data/safetensors.h>
#include <reprise/models/script.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/utils.h>

#include <map>
#include <set>
#include <utility>
#include <vector>

namespace reprise {
namespace {

using detail::ScriptTensor;
using nlohmann::json;
using torch::Tensor;

constexpr int kVersion = 1;
constexpr int kMostTensors = 10'000;  // of a stage

/// One entry of "stages" in model.json.
struct StageFile {
  std::string name;
  std::string file;
  std::string evaluation;  ///< empty: `file` has both modes
  int inputs = 0;
  int outputs = 0;
  std::map<std::string, std::string>
      tensors;  ///< name in the model, by own name
};

struct ModelFile {
  std::string path;
  std::string name;
  std::string dtype;
  int inputs = 0;  ///< without the targets
  std::vector<StageFile> stages;
};

ModelFile parse_model_file(const std::string& path, const json& root) {
  const int version = root.at("version").get<int>();
  TORCH_CHECK(version == kVersion, "[script] ", path, ": expected version ",
              kVersion, ", got ", version,
              "; write the directory again with the split_model.py of this "
              "version of Reprise");
  ModelFile model{.path = path,
                  .name = root.at("name"),
                  .dtype = root.at("dtype"),
                  .inputs = root.at("inputs"),
                  .stages = {}};
  for (const json& stage : root.at("stages")) {
    model.stages.push_back({.name = stage.at("name"),
                            .file = stage.at("file"),
                            .evaluation = stage.value("evaluation", ""),
                            .inputs = stage.at("inputs"),
                            .outputs = stage.at("outputs"),
                            .tensors = stage.at("tensors")});
  }
  return model;
}

ModelFile read_model_file(const std::string& path) {
  const std::string text = read_text(path);
  const std::string limit = why_not_parsed(text);
  TORCH_CHECK(limit.empty(), "[script] ", path, ": ", limit);
  try {
    return parse_model_file(path, json::parse(text));
  } catch (const json::exception& error) {
    TORCH_CHECK(false, "[script] ", path,
                ": expected a file written by split_model.py: ",
                shortened(error.what()));
  }
}

/// Follows the number of tensors through the stages.
void check_counts(const ModelFile& model) {
  TORCH_CHECK(model.inputs >= 0 && model.inputs <= kMostTensors, "[script] ",
              model.path, ": expected 0 to ", kMostTensors, " inputs, got ",
              model.inputs);
  int count = model.inputs + 1;  // the targets
  TORCH_CHECK(!model.stages.empty(), "[script] ", model.path,
              ": expected at least one stage, got none");
  for (const StageFile& stage : model.stages) {
    TORCH_CHECK(stage.outputs >= 0 && stage.outputs <= kMostTensors,
                "[script] ", model.path, ": stage ", quoted_name(stage.name),
                " returns ", stage.outputs, " tensors, expected 0 to ",
                kMostTensors);
    TORCH_CHECK(stage.inputs >= 1 && stage.inputs <= count, "[script] ",
                model.path, ": stage ", quoted_name(stage.name), " takes ",
                stage.inputs, " tensors, expected 1 to ", count,
                ", which the stages before it pass on");
    count += stage.outputs - stage.inputs;
  }
  const StageFile& loss = model.stages.back();
  TORCH_CHECK(count == loss.outputs, "[script] ", model.path,
              ": expected that the last stage takes all tensors, as a loss "
              "does, but ",
              count - loss.outputs, " are left behind ",
              quoted_name(loss.name));
}

/// Owns the tensors under the names of the model. The scripts are no submodules, because
/// they have the same tensors under names of their own.
class Root : public torch::nn::Module {
 public:
  explicit Root(const std::string& name) : torch::nn::Module(name) {}

  void train(bool on = true) override {
    torch::nn::Module::train(on);
    for (const auto& script : scripts) script->train(on);
  }

  std::vector<std::shared_ptr<ScriptModule>> scripts;
};

/// All tensors of the model by name. Stages that name the same tensor share it.
class Weights {
 public:
  Weights(const ModelFile& model, const std::string& path)
      : model_(model), file_(path) {}

  /// Fills the tensors of a script, or replaces them by those of earlier stages.
  void load(const StageFile& stage, const torch::jit::Module& script) {
    for (const auto& item : detail::script_tensors(script, stage.name)) {
      const auto name = stage.tensors.find(item.name);
      TORCH_CHECK(name != stage.tensors.end(), "[script] ", model_.path,
                  ": expected a name for tensor ", quoted_name(item.name),
                  " of stage ", quoted_name(stage.name),
                  ", got none; write the directory again");
      check(stage, item, name->second);
      const auto [found, first] = tensors_.emplace(name->second, item);
      if (first) {
        const torch::NoGradGuard no_grad;
        item.get().copy_(file_.read(name->second));
        order_.push_back(name->second);
      } else {
        item.set(found->second.get());
      }
    }
  }

  /// Throws if the file has tensors that no stage uses.
  void check_all_used() const {
    for (const auto& [name, entry] : file_.entries()) {
      TORCH_CHECK(tensors_.contains(name), "[script] ", file_.path(),
                  ": no stage of ", model_.name, " has tensor ",
                  quoted_name(name), "; is it a file of another model?");
    }
  }

  void register_in(torch::nn::Module& root) const {
    for (const auto& name : order_) {
      const ScriptTensor& item = tensors_.at(name);
      detail::register_dotted(root, name, item.get(), item.parameter);
    }
  }

 private:
  void check(const StageFile& stage, const ScriptTensor& item,
             const std::string& name) const {
    const auto entry = file_.entries().find(name);
    TORCH_CHECK(entry != file_.entries().end(), "[script] ", file_.path(),
                ": expected tensor ", quoted_name(name), " of stage ",
                quoted_name(stage.name), ", which the file does not have");
    const Tensor tensor = item.get();
    TORCH_CHECK(tensor.sizes() == entry->second.shape, "[script] ",
                file_.path(), ": tensor ", quoted_name(name), " has shape ",
                c10::IntArrayRef(entry->second.shape), ", expected ",
                tensor.sizes(), " as in ", stage.file);
    TORCH_CHECK(tensor.scalar_type() == entry->second.type, "[script] ",
                file_.path(), ": tensor ", quoted_name(name), " has type ",
                entry->second.type, ", expected ", tensor.scalar_type(),
                " as in ", stage.file, "; write the directory again");
    TORCH_CHECK(
        !item.parameter || type_name(tensor.scalar_type()) == model_.dtype,
        "[script] ", model_.path, ": expected parameters of type ",
        model_.dtype, ", got ", type_name(tensor.scalar_type()), " for ",
        quoted_name(name), " in ", stage.file, "; write the directory again");
  }

  static std::string type_name(torch::ScalarType type) {
    switch (type) {
      case torch::kFloat:
        return "float32";
      case torch::kDouble:
        return "float64";
      case torch::kHalf:
        return "float16";
      case torch::kBFloat16:
        return "bfloat16";
      default:
        return c10::toString(type);
    }
  }

  const ModelFile& model_;
  SafeTensors file_;
  std::map<std::string, ScriptTensor> tensors_;
  std::vector<std::string> order_;
};

/// Outputs of a chain for those of a loss: the sum, and in evaluation the number of correct
/// predictions.
Tensors loss_outputs(Tensors outputs, bool training, const std::string& name) {
  TORCH_CHECK(!outputs.empty() && outputs[0].numel() == 1, "[script ",
              quoted_name(name),
              "] expected the sum of the losses, a single number, got ",
              outputs.empty() ? std::string("nothing")
                              : fmt::format("{} numbers", outputs[0].numel()),
              "; use reduction='sum'");
  outputs[0] = outputs[0].reshape({});
  if (training) return {outputs[0]};
  const auto type = torch::dtype(torch::kDouble).device(outputs[0].device());
  if (outputs.size() < 2) return {outputs[0], torch::zeros({}, type)};
  return {outputs[0], outputs[1].to(torch::kDouble)};
}

Stage make_script_stage(const StageFile& file,
                        const std::shared_ptr<ScriptModule>& script,
                        bool loss) {
  const auto run = [script, loss, name = file.name, inputs = file.inputs,
                    outputs = file.outputs](const Tensors& all) -> Tensors {
    TORCH_CHECK(static_cast<int>(all.size()) >= inputs, "[stage ",
                quoted_name(name), "] expected at least ", inputs,
                " tensors, got ", all.size());
    Tensors result = script->forward({all.begin(), all.begin() + inputs});
    if (loss) {
      return loss_outputs(std::move(result), script->is_training(), name);
    }
    TORCH_CHECK(static_cast<int>(result.size()) == outputs, "[stage ",
                quoted_name(name), "] expected that its script returns ",
                outputs, " tensors, as model.json states, got ", result.size());
    result.insert(result.end(), all.begin() + inputs, all.end());
    return result;
  };
  return Stage(file.name, run, {script});
}

}  // namespace

Model load_script_model(const std::string& directory) {
  const ModelFile file = read_model_file(directory + "/model.json");
  check_counts(file);
  Weights weights(file, directory + "/weights.safetensors");
  const auto root = std::make_shared<Root>(file.name);
  std::vector<Stage> stages;
  std::string key = fmt::format("script {} {}", file.name, file.inputs);
  for (const StageFile& stage : file.stages) {
    const auto script = detail::load_script(directory + "/" + stage.file);
    weights.load(stage, script);
    const std::string code = detail::describe_script(script);
    if (stage.evaluation.empty()) {
      root->scripts.push_back(
          std::make_shared<ScriptModule>(script, stage.name));
    } else {
      root->scripts.push_back(std::make_shared<ScriptModule>(
          script, detail::load_script(directory + "/" + stage.evaluation),
          stage.name));
    }
    const auto& module = root->scripts.back();
    TORCH_CHECK(module->required_inputs() <= stage.inputs &&
                    stage.inputs <= module->most_inputs(),
                "[script] ", file.path, ": stage ", quoted_name(stage.name),
                " takes ", stage.inputs, " tensors, but forward() in ",
                stage.file, " takes ", module->most_inputs());
    const std::string kind = fmt::format("script-{:016x}", fnv1a(code));
    key += fmt::format(" {}:{}:{}", kind, stage.inputs, stage.outputs);
    stages.push_back(
        make_script_stage(stage, module, &stage == &file.stages.back())
            .of_kind(kind));
  }
  weights.check_all_used();
  weights.register_in(*root);
  root->train();
  return Model{.name = file.name,
               .options = {},
               .root = root,
               .chain = Chain(std::move(stages)),
               .cost_key = std::move(key),
               .metrics = {"accuracy"}};
}

}  // namespace reprise
