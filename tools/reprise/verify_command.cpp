#include "base/text_check.h"
#include "checks.h"
#include "commands.h"
#include "config_options.h"
#include "errors.h"
#include "plugins.h"

#include <reprise/base/bytes.h>
#include <reprise/models/model.h>
#include <reprise/train/inputs.h>
#include <reprise/verify/verify.h>

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <iostream>
#include <memory>
#include <numeric>
#include <set>
#include <sstream>

namespace reprise::command {
namespace {

// On CUDA, some kernels sum in an order that differs between runs. The
// tolerance is for single precision after three updates; see docs/exactness.md.
constexpr double kCudaTolerance = 1e-5;

struct Flags {
  std::vector<std::string> models;
  ModelOptions sizes{};  // sizes of built-in models
  bool sized = false;    // whether a size was given
  std::vector<std::string> strategies;
  TrainOptions options;  // device, seed and threads
  OutputFormat format = OutputFormat::kTable;
  int64_t batch = 6;
  int updates = 3;
  std::string plugin;
  bool nested = false;
};

std::vector<std::string> default_strategies() {
  std::vector<std::string> texts;
  for (const Strategy& strategy : sample_strategies()) {
    texts.push_back(strategy.to_text());
  }
  return texts;
}

std::string difference(const VerifyRow& row) {
  if (row.different == 0) return "=";
  return fmt::format("{:.1e} ({}/{})", row.max_relative, row.different,
                     row.tensors);
}

int total(const std::vector<int>& runs) {
  return std::accumulate(runs.begin(), runs.end(), 0);
}

void print_table(const std::vector<VerifyReport>& reports, double tolerance) {
  fmt::print("{:<18}{:<15}{:<18}{:<18}{:<18}{:<10}{:<18}{:<11}{:>11}  {}\n",
             "model", "recompute", "loss", "gradients", "buffers", "rng",
             "parameters", "runs/sim.", "kept peak", "verdict");
  for (const VerifyReport& report : reports) {
    fmt::print("{:<18}{:<15}", report.subject, report.strategy);
    for (const VerifyRow& row : report.rows) {
      fmt::print("{:<{}}", difference(row),
                 row.what == VerifiedKind::kRng ? 10 : 18);
    }
    fmt::print(
        "{:<11}{:>11}  {}\n",
        fmt::format("{}/{}", total(report.runs), total(report.simulated_runs)),
        format_bytes(report.kept_peak_bytes),
        report.same ? "same" : "DIFFERENT");
  }
  fmt::print(
      "\n= equal in every bit; else the largest relative difference and "
      "how many tensors differ.\n");
  if (tolerance == 0) {
    fmt::print("Required: no difference.\n");
  } else {
    fmt::print("Required: at most {:.0e}, rng equal.\n", tolerance);
  }
}

nlohmann::json to_json(const VerifyReport& report) {
  nlohmann::json json = {{"model", report.subject},
                         {"recompute", report.strategy},
                         {"same", report.same},
                         {"runs", report.runs},
                         {"simulated_runs", report.simulated_runs},
                         {"kept_peak_bytes", report.kept_peak_bytes},
                         {"simulated_kept_bytes", report.simulated_kept_bytes}};
  for (const VerifyRow& row : report.rows) {
    json["compared"][to_text(row.what)] = {{"tensors", row.tensors},
                                           {"different", row.different},
                                           {"max_relative", row.max_relative},
                                           {"worst", row.worst},
                                           {"same", row.same}};
  }
  return json;
}

struct Subject {
  VerifySubject subject;
  int stages = 0;
};

Subject subject_of(const SampleChain& sample, const Flags& flags,
                   torch::Device device) {
  TORCH_CHECK(!flags.sized,
              "[--model] sizes such as --depth are for train's models, got ",
              sample.name);
  SampleChainOptions options;
  options.device = device;
  options.batch = flags.batch;
  SampleChainOptions tested = options;
  tested.nested_checkpoint = flags.nested;
  return {{sample.name, [=] { return sample.make_chain(tested); },
           [=] { return sample.make_inputs(options); },
           [=] { return sample.make_chain(options); }},
          sample.make_chain({}).size()};
}

/// Returns the subject for a registered model.
Subject subject_of(const std::string& name, const Flags& flags,
                   torch::Device device) {
  TORCH_CHECK(!flags.nested,
              "[--nested] is for models that begin with tiny-, got ", name);
  const Model first = make_model(name, flags.sizes);
  const ModelOptions sizes = first.options;
  const Task task = first.task;
  const int64_t batch = flags.batch;
  const auto make_chain = [name, given = flags.sizes, device] {
    const Model made = make_model(name, given);
    made.root->to(device);
    made.root->train();
    return made.chain;
  };
  if (task == Task::kOther) {
    // A batch of its own dataset.
    TrainConfig config;
    config.model = name;
    config.model_options = flags.sizes;
    config.data = default_data(config);
    config.evaluate = false;
    const TrainData data = open_train_data(config, first);
    std::vector<int64_t> indices;
    for (int64_t i = 0; i < batch; ++i)
      indices.push_back(i % data.train->size());
    Batch own = data.train->get(indices);
    if (data.prepare) data.prepare(own);
    move_to(own, device);
    return {{.name = name,
             .make_chain = make_chain,
             .make_inputs = [own] { return own.tensors; },
             .count = std::max<int64_t>(1, own.count)},
            first.chain.size()};
  }
  const int64_t losses = task == Task::kLanguage ? sizes.seq - 1 : 1;
  return {
      {.name = name,
       .make_chain = make_chain,
       .make_inputs = [=] { return random_batch(task, sizes, batch, device); },
       .count = std::max<int64_t>(1, batch * losses)},
      first.chain.size()};
}

/// Returns the names of the sample chains, then those of the built-in models.
std::vector<std::string> known_names() {
  std::vector<std::string> names;
  for (const SampleChain& sample : sample_chains())
    names.push_back(sample.name);
  for (const ModelInfo& info : model_list()) names.push_back(info.name);
  return names;
}

std::vector<Subject> subjects_of(const Flags& flags, torch::Device device) {
  std::vector<Subject> subjects;
  if (flags.models.empty()) {
    for (const SampleChain& sample : sample_chains()) {
      subjects.push_back(subject_of(sample, flags, device));
    }
  }
  for (const auto& name : flags.models) {
    const auto sample =
        std::find_if(sample_chains().begin(), sample_chains().end(),
                     [&](const SampleChain& one) { return one.name == name; });
    subjects.push_back(sample == sample_chains().end()
                           ? subject_of(name, flags, device)
                           : subject_of(*sample, flags, device));
  }
  return subjects;
}

int verify_all(const Flags& flags) {
  if (flags.options.threads > 0) at::set_num_threads(flags.options.threads);
  const torch::Device device = device_of(flags.options.device);
  VerifyOptions how;
  how.updates = flags.updates;
  how.seed = flags.options.seed;
  how.tolerance = device.is_cuda() ? kCudaTolerance : 0;

  const std::vector<Subject> subjects = subjects_of(flags, device);
  std::vector<Strategy> strategies;
  for (const auto& text : flags.strategies) {
    strategies.push_back(Strategy::parse(text));
  }
  for (const Subject& one : subjects) {  // throws if K is too large
    for (const auto& strategy : strategies) make_schedule(strategy, one.stages);
  }

  std::vector<VerifyReport> reports;
  bool same = true;
  for (const auto& [subject, stages] : subjects) {
    for (const Strategy& strategy : strategies) {
      reports.push_back(verify(subject, strategy, how));
      same &= reports.back().same;
      std::cerr << fmt::format("verify {} {}: {}\n", subject.name,
                               strategy.to_text(),
                               reports.back().same ? "same" : "DIFFERENT");
    }
  }
  if (flags.format == OutputFormat::kJson) {
    nlohmann::json json = {{"device", flags.options.device},
                           {"tolerance", how.tolerance},
                           {"same", same},
                           {"results", nlohmann::json::array()}};
    for (const auto& report : reports) {
      json["results"].push_back(to_json(report));
    }
    fmt::print("{}\n", json.dump(2));
  } else {
    print_table(reports, how.tolerance);
  }
  return same ? 0 : 1;
}

std::string known_models() {
  std::string text;
  for (const SampleChain& sample : sample_chains()) {
    text += fmt::format("\n  {:<18}{}", sample.name, sample.description);
  }
  return text;
}

}  // namespace

void add_verify(CLI::App& app, Action& action) {
  auto flags = std::make_shared<Flags>();
  flags->strategies = default_strategies();
  CLI::App* verify = app.add_subcommand(
      "verify",
      "Check that recomputation changes nothing: train with and without it and "
      "compare loss, gradients, buffers, random numbers and parameters");
  add_fields(*verify, model_fields(), flags->sizes);
  add_plugin_flag(*verify, flags->plugin);
  TrainOptions& options = flags->options;
  for (const auto& field : option_fields()) {
    const bool used = std::set<std::string>{"device", "seed", "threads"}.count(
                          field.name) > 0;
    if (!used) continue;
    add_field(*verify, field, field.get(options),
              [&options, set = field.set](const std::string& text) {
                set(options, text);
              });
  }
  // These flags accept other values than the flags of train with the same
  // names.
  CLI::Option* model = verify->add_option(
      "--model", flags->models,
      "Models to verify (default: all of these):" + known_models() +
          "\nor any of train's, in their own sizes unless flags change them");
  set_check(model, one_of(known_names()));
  set_words(model, known_names());
  CLI::Option* recompute =
      verify
          ->add_option(
              "--recompute", flags->strategies,
              fmt::format("Strategies: {}", fmt::join(strategy_names(), ", ")))
          ->capture_default_str()
          ->delimiter(',');
  set_check(recompute, strategy_text());
  set_words(recompute, strategy_names());
  set_check(verify->add_option("--batch", flags->batch, "Samples per batch")
                ->capture_default_str(),
            whole_number(1, 1 << 16));
  set_check(verify->add_option("--updates", flags->updates, "Number of updates")
                ->capture_default_str(),
            whole_number(1, 1000));
  verify->add_flag("--nested", flags->nested,
                   "Also wrap part of each stage in checkpoint()");
  add_format_flag(*verify, flags->format);
  verify->footer(
      std::string(
          "On the CPU results must be bitwise equal. On CUDA, where some "
          "kernels sum in a\nvarying order, a relative difference of "
          "1e-5 is allowed.\nStatus 1 also means that results differ.\n") +
      kStatuses);
  verify->callback([flags, verify, &action] {
    for (const auto& field : model_fields()) {
      flags->sized |= verify->count("--" + field.name) > 0;
    }
    action = [flags] { return verify_all(*flags); };
  });
}

}  // namespace reprise::command
