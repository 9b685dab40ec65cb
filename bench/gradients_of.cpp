// Loss and gradients of a built-in model for given weights and a given batch, for
// comparisons with other implementations (hf_llama.py):
//
//     gradients_of llama-small --weights model.safetensors --batch batch.safetensors
//         --out result.safetensors [--vocab 61 …] [--device cuda] [--export copy.safetensors]
//
// The batch has the tensors x, targets and, for rows of several documents, segments. The
// result has the loss (the sum, not the mean) and grad.NAME for each parameter.
#include <reprise/data/safetensors.h>
#include <reprise/models/model.h>
#include <reprise/recompute/execution.h>
#include <reprise/recompute/strategy.h>
#include <reprise/train/fields.h>

#include <CLI/CLI.hpp>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <iostream>
#include <map>
#include <string>

namespace {

struct Arguments {
  std::string name, weights, batch, out, copy;
  std::string device = "cpu", strategy = "none";
  std::map<std::string, std::string> sizes;
};

reprise::Tensors read_batch(const std::string& path, torch::Device device) {
  const reprise::SafeTensors file(path);
  reprise::Tensors batch;
  for (const char* name : {"x", "targets", "segments"}) {
    if (file.entries().contains(name)) {
      batch.push_back(file.read(name).to(device));
    }
  }
  return batch;
}

void run(const Arguments& arguments) {
  reprise::ModelOptions options;
  for (const auto& field : reprise::model_fields()) {
    const auto given = arguments.sizes.find(field.name);
    if (given != arguments.sizes.end() && !given->second.empty()) {
      field.set(options, given->second);
    }
  }
  reprise::Model model = reprise::make_model(arguments.name, options);
  reprise::load_weights(model, arguments.weights);
  if (!arguments.copy.empty()) reprise::export_weights(model, arguments.copy);
  const torch::Device device(arguments.device);
  model.root->to(device);
  reprise::Execution execution(
      model.chain,
      reprise::make_schedule(arguments.strategy, model.chain.size()));
  const torch::Tensor loss =
      execution.forward(read_batch(arguments.batch, device)).at(0);
  execution.backward({torch::ones_like(loss)});
  reprise::NamedTensors results = {{"loss", loss.detach().reshape({1})}};
  for (const auto& item : model.root->named_parameters()) {
    results.emplace_back("grad." + item.key(), item.value().grad());
  }
  reprise::write_safetensors(arguments.out, results);
  fmt::print("loss {:.9g}\n", loss.item<double>());
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  CLI::App app("Loss and gradients of a model for given weights and a batch");
  app.add_option("name", arguments.name, "Built-in model")->required();
  app.add_option("--weights", arguments.weights, "As in reprise train")
      ->required();
  app.add_option("--batch", arguments.batch, "Safetensors file with the batch")
      ->required();
  app.add_option("--out", arguments.out, "Safetensors file for the results")
      ->required();
  app.add_option("--export", arguments.copy,
                 "Safetensors file for the weights");
  app.add_option("--device", arguments.device, "cpu or cuda");
  app.add_option("--recompute", arguments.strategy, "Strategy");
  for (const auto& field : reprise::model_fields()) {
    app.add_option("--" + field.name, arguments.sizes[field.name], field.help);
  }
  CLI11_PARSE(app, argc, argv);
  try {
    run(arguments);
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
