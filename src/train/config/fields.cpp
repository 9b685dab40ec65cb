// The fields of a configuration that name a model and a dataset.
#include "base/nearest.h"
#include "base/text_check.h"
#include "models/own_options.h"

#include <reprise/data/dataset.h>
#include <reprise/recompute/strategy.h>
#include <reprise/train/fields.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <list>
#include <mutex>
#include <type_traits>
#include <utility>

namespace reprise {
namespace {

constexpr uint64_t kMostSamples = 1'000'000'000;

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const ModelInfo& info : model_list()) names.push_back(info.name);
  return names;
}

std::string model_descriptions() {
  std::string text;
  for (const ModelInfo& info : model_list()) {
    text += fmt::format("\n  {:<14}{}", info.name, info.description);
  }
  return text;
}

/// A size of a model: a whole number up to `most`; 0 stands for the model's default.
FieldInfo size_field(const char* name, uint64_t most, const char* help) {
  return {.name = name,
          .group = "Model",
          .help = help,
          .check = whole_number(1, most),
          .unset = "0",
          .same_on_resume = true,
          .affects_costs = true};
}

/// Help text of an option with its default in each model.
std::string own_help(const detail::SharedOption& shared) {
  const auto& defaults = shared.defaults;
  const bool same = std::all_of(
      defaults.begin(), defaults.end(),
      [&](const std::string& one) { return one == defaults.front(); });
  if (same) {
    const bool shown =
        !defaults.front().empty() && shared.option.value != OptionValue(false);
    return shared.option.help +
           (shown ? fmt::format(" (default {})", defaults.front()) : "");
  }
  std::vector<std::string> texts;
  for (size_t i = 0; i < defaults.size(); ++i) {
    texts.push_back(fmt::format("{} for {}", defaults[i], shared.models[i]));
  }
  return fmt::format("{} (default {})", shared.option.help,
                     fmt::join(texts, ", "));
}

/// The field of an option that models have registered for themselves.
Field<ModelOptions> own_field(const detail::SharedOption& shared) {
  const OwnOption& option = shared.option;
  Field<ModelOptions> field;
  FieldInfo& info = field;
  info = {.name = option.name,
          .group = fmt::format("Options of {}", fmt::join(shared.models, ", ")),
          .help = own_help(shared),
          .check = detail::option_check(option),
          .unset = "",
          .metavar = fmt::format("{}", fmt::join(option.choices, "|")),
          .same_on_resume = true,
          .affects_costs = true,
          .absent_if_unset = true,
          .choices = option.choices};
  field.get = [name = option.name](const ModelOptions& options) {
    const auto found = options.own.find(name);
    return found == options.own.end() ? "" : detail::option_text(found->second);
  };
  std::visit(
      [&](const auto& value) {
        using T = std::decay_t<decltype(value)>;
        info.kind = detail::kind_of<T>();
        field.set = [info](ModelOptions& options, const std::string& text) {
          options.own[info.name] = detail::parse_value<T>(info, text);
        };
      },
      option.value);
  return field;
}

FieldTable<ModelOptions> make_model_fields() {
  using M = ModelOptions;
  FieldTable<M> table;
  table.add(&M::depth, size_field("depth", 1 << 14, "Number of blocks"))
      .add(&M::width, size_field("width", 1 << 18, "Hidden size or channels"))
      .add(&M::heads, size_field("heads", 1 << 14, "Number of attention heads"))
      .add(&M::kv_heads, size_field("kv-heads", 1 << 14,
                                    "Number of heads of keys and values"))
      .add(&M::mlp_width, size_field("mlp-width", 1 << 20,
                                     "Hidden size of the feed-forward layers"))
      .add(&M::classes, size_field("classes", 1 << 24, "Number of classes"))
      .add(&M::vocab,
           size_field("vocab", 1 << 24, "Number of tokens in the vocabulary"))
      .add(&M::seq, size_field("seq", 1 << 24, "Number of tokens per sequence"))
      .add(&M::image_size,
           size_field("image-size", 1 << 14,
                      "Height and width of the images in pixels"))
      .add(&M::channels,
           size_field("channels", 1 << 12, "Number of image channels"))
      .add(&M::norm, {.name = "norm",
                      .group = "Model",
                      .help = "Normalisation: batch or group",
                      .check = one_of({"batch", "group"}),
                      .metavar = "batch|group",
                      .same_on_resume = true,
                      .affects_costs = true,
                      .choices = {"batch", "group"}})
      .add(&M::dropout, {.name = "dropout",
                         .group = "Model",
                         .help = "Probability of dropout, from 0 to below 1",
                         .check = real_number(0, 1, Ends::kLow),
                         .unset = "-1",
                         .same_on_resume = true,
                         .affects_costs = true});
  for (const auto& shared : detail::shared_options()) {
    table.add(own_field(shared));
  }
  return table;
}

FieldTable<LoraOptions> lora_fields() {
  using L = LoraOptions;
  const auto field = [](const char* name, const char* help, FieldCheck check) {
    return FieldInfo{.name = name,
                     .group = "Model",
                     .help = help,
                     .check = std::move(check),
                     .same_on_resume = true,
                     .affects_costs = true};
  };
  FieldInfo rank =
      field("lora", "Rank of low-rank adapters, trained instead of the weights",
            whole_number(1, 1 << 14));
  rank.unset = "0";
  rank.metavar = "RANK";
  FieldInfo alpha =
      field("lora-alpha",
            "Scale of the adapters, times their rank (default: the rank)",
            real_number(0, 1e9, Ends::kNone));
  alpha.unset = "0";
  FieldInfo targets = field(
      "lora-targets",
      "Layers with an adapter, such as q_proj,v_proj (default: all-linear)",
      {});
  targets.metavar = "NAMES";
  targets.choices = {"all-linear"};
  FieldTable<L> table;
  table.add(&L::rank, rank)
      .add(&L::alpha, alpha)
      .add(&L::targets, targets)
      .add(&L::dropout, field("lora-dropout", "Dropout of the adapters' inputs",
                              real_number(0, 1, Ends::kLow)));
  return table;
}

/// Throws if an option of a model has the name of a field.
void check_own_names(const FieldTable<TrainConfig>& table) {
  for (const auto& shared : detail::shared_options()) {
    const auto same = std::count_if(
        table.begin(), table.end(),
        [&](const auto& field) { return field.name == shared.option.name; });
    TORCH_CHECK(same == 1, "[model ", shared.models.front(), "] its option ",
                shared.option.name,
                " has the name of a flag of train; choose another name");
  }
}

/// A table that is made again when more models or datasets are registered. Earlier tables
/// are kept.
template <class Config>
class GrowingTable {
 public:
  using Make = FieldTable<Config> (*)();
  explicit GrowingTable(Make make) : make_(make) {}

  const FieldTable<Config>& get() {
    const std::lock_guard lock(mutex_);
    const size_t names = model_list().size() + dataset_names().size();
    if (tables_.empty() || names != names_) {
      tables_.push_back(make_());
      names_ = names;
    }
    return tables_.back();
  }

 private:
  Make make_;
  std::mutex mutex_;
  size_t names_ = 0;  // that the last table knows
  std::list<FieldTable<Config>> tables_;
};

FieldTable<TrainConfig> make_config_fields() {
  using C = TrainConfig;
  FieldTable<C> table;
  table.add(&C::model, {.name = "model",
                        .group = "Model",
                        .help = "Model:" + model_descriptions(),
                        .check =
                            [](const std::string& text) {
                              return one_of(model_names())(text);
                            },
                        .metavar = "NAME",
                        .same_on_resume = true,
                        .affects_costs = true,
                        .choices = model_names()});
  table.add(&C::plugin, {.name = "plugin",
                         .group = "Model",
                         .help = "Plug-ins of the command",
                         .metavar = "PATH",
                         .same_on_ranks = false,
                         .in_studies = false,
                         .on_command_line = false,
                         .absent_if_unset = true});
  table.add_part(&C::model_options, model_fields());
  table.add(&C::weights,
            {.name = "weights",
             .group = "Model",
             .help = "Safetensors file to start from (Hugging Face's or "
                     "torchvision's names), or the index or directory of a "
                     "checkpoint in several files",
             .metavar = "PATH",
             .same_on_ranks = false});
  table.add_part(&C::lora, lora_fields());
  table
      .add(&C::adapter,
           {.name = "adapter",
            .group = "Model",
            .help = "Directory of a LoRA adapter to continue from, in the "
                    "format of Hugging Face's PEFT",
            .metavar = "DIR",
            .affects_costs = true,
            .same_on_ranks = false})
      .add(&C::data,
           {.name = "data",
            .group = "Data",
            .help = fmt::format(
                "Dataset: {}, or a path: IDX images, a text file, a .bin file "
                "of uint16 "
                "tokens, a .u32 file of uint32 tokens (default: mnist for "
                "images, random for tokens)",
                fmt::join(dataset_names(), ", ")),
            .metavar = "NAME|PATH",
            .same_on_resume = true,
            .affects_costs = true,
            .choices = dataset_names()})
      .add(&C::random_samples, {.name = "random-samples",
                                .group = "Data",
                                .help = "Number of samples in random",
                                .check = whole_number(1, kMostSamples),
                                .same_on_resume = true})
      .add(&C::documents,
           {.name = "documents",
            .group = "Data",
            .help = "Samples of a text or token file: stream, consecutive "
                    "tokens; padded, one document each; packed, as many "
                    "documents as fit",
            .same_on_resume = true,
            .affects_costs = true})
      .add(&C::document_end,
           {.name = "document-end",
            .group = "Data",
            .help = "Last token of each document, with padded or packed "
                    "--documents; for text, a byte",
            .check = whole_number(0, std::numeric_limits<int32_t>::max()),
            .unset = "-1",
            .metavar = "TOKEN",
            .same_on_resume = true});
  table.add_all(option_fields());
  check_own_names(table);
  return table;
}

}  // namespace

const FieldTable<ModelOptions>& model_fields() {
  static GrowingTable<ModelOptions> table(make_model_fields);
  return table.get();
}

const FieldTable<TrainConfig>& config_fields() {
  static GrowingTable<TrainConfig> table(make_config_fields);
  return table.get();
}

FieldCheck device_name(std::vector<std::string> also) {
  return [also = std::move(also)](const std::string& text) -> std::string {
    std::vector<std::string> words = also;
    words.insert(words.end(), {"cpu", "cuda"});
    if (std::find(words.begin(), words.end(), text) != words.end()) return "";
    constexpr std::string_view kIndexed = "cuda:";
    constexpr uint64_t kMostDevices = 127;
    if (text.starts_with(kIndexed) &&
        whole_number(0, kMostDevices)(text.substr(kIndexed.size())).empty()) {
      return "";
    }
    return fmt::format(
        "expected {}cpu, cuda or cuda:N, got {}{}",
        also.empty() ? "" : also.front() + ", ", in_quotes(text),
        text.find(':') == std::string::npos ? did_you_mean(text, words) : "");
  };
}

FieldCheck strategy_text(std::vector<std::string> also) {
  return [also = std::move(also)](const std::string& text) -> std::string {
    if (std::find(also.begin(), also.end(), text) != also.end()) return "";
    try {
      Strategy::parse(text);
      return "";
    } catch (const c10::Error& error) {
      std::vector<std::string> words = strategy_names();
      words.insert(words.end(), also.begin(), also.end());
      // Compared without what follows the colon.
      const std::string given = text.substr(0, text.find(':'));
      std::vector<std::string> stems;
      for (const std::string& word : words) {
        stems.push_back(word.substr(0, word.find(':')));
        if (stems.back() == given)
          return without_origin(error.what_without_backtrace());
      }
      const auto at =
          std::find(stems.begin(), stems.end(), nearest(given, stems));
      const std::string hint =
          at == stems.end()
              ? ""
              : fmt::format("; did you mean {}?",
                            words[static_cast<size_t>(at - stems.begin())]);
      return fmt::format("expected one of {}, got {}{}", fmt::join(words, ", "),
                         in_quotes(text), hint);
    }
  };
}

}  // namespace reprise
