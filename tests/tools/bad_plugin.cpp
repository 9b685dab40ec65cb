// A plug-in that registers what REPRISE_BAD_PLUGIN names; for plugin_test.py.
#include <reprise/command.h>

#include <torch/nn/modules/linear.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <stdexcept>

namespace {

reprise::Model make_other(const reprise::ModelOptions& options) {
  const auto layer =
      std::make_shared<torch::nn::LinearImpl>(options.get<int64_t>("taps"), 1);
  return {.root = layer, .chain = reprise::Chain({})};
}

/// Registers a model with one option.
std::function<void()> with_option(const char* name,
                                  const reprise::OptionValue& value) {
  return [=] {
    reprise::register_model(
        {.name = "other",
         .description = "one layer",
         .make = make_other,
         .own_options = {
             {.name = name, .help = "Number of inputs", .value = value}}});
  };
}

void register_bad() {
  const std::map<std::string, std::function<void()>> all = {
      {"nothing", [] {}},
      {"throws", [] { throw std::runtime_error("no licence"); }},
      {"throws-int", [] { throw 1; }},
      {"other", with_option("taps", 7)},
      {"field", with_option("batch", 1)},
      {"flag", with_option("out", 1)},
  };
  all.at(std::getenv("REPRISE_BAD_PLUGIN"))();
}

}  // namespace

REPRISE_PLUGIN(register_bad);
