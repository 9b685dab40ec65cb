#include "models/own_options.h"

#include "base/nearest.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <set>

namespace reprise::detail {
namespace {

/// The names of the types of OptionValue.
const char* type_text(const OptionValue& value) {
  constexpr const char* kNames[] = {"true or false", "a whole number",
                                    "a number", "a text"};
  return kNames[value.index()];
}

std::string range_text(const OwnOption& option) {
  const bool low = std::isfinite(option.lowest);
  const bool high = std::isfinite(option.highest);
  if (low && high) {
    return fmt::format(" from {:g} to {:g}", option.lowest, option.highest);
  }
  if (low) return fmt::format(" of at least {:g}", option.lowest);
  return high ? fmt::format(" of at most {:g}", option.highest) : "";
}

/// Whether `text` is a number of the option's type.
bool is_number(const OwnOption& option, const std::string& text) {
  constexpr double kLargest = std::numeric_limits<double>::max();
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  return std::holds_alternative<double>(option.value)
             ? real_number(-kLargest, kLargest)(text).empty()
             : whole_number(-kMost, kMost)(text).empty();
}

TextCheck number_check(const OwnOption& option) {
  return [option](const std::string& text) -> std::string {
    if (is_number(option, text)) {
      const double value = std::strtod(text.c_str(), nullptr);
      if (value >= option.lowest && value <= option.highest) return "";
    }
    return fmt::format("expected {}{}, got {}", type_text(option.value),
                       range_text(option), in_quotes(text));
  };
}

bool is_flag_name(const std::string& name) {
  const auto in = [](char c, char low, char high) {
    return c >= low && c <= high;
  };
  return !name.empty() && in(name.front(), 'a', 'z') && name.back() != '-' &&
         std::all_of(name.begin(), name.end(), [&](char c) {
           return in(c, 'a', 'z') || in(c, '0', '9') || c == '-';
         });
}

void merge(SharedOption& known, const OwnOption& option) {
  OwnOption& all = known.option;
  all.lowest = std::min(all.lowest, option.lowest);
  all.highest = std::max(all.highest, option.highest);
  if (all.choices.empty() || option.choices.empty()) {
    all.choices.clear();
    return;
  }
  for (const std::string& choice : option.choices) {
    const auto end = all.choices.end();
    if (std::find(all.choices.begin(), end, choice) == end) {
      all.choices.push_back(choice);
    }
  }
}

}  // namespace

std::string option_text(const OptionValue& value) {
  if (const bool* on = std::get_if<bool>(&value)) return *on ? "true" : "false";
  if (const auto* text = std::get_if<std::string>(&value)) return *text;
  if (const auto* real = std::get_if<double>(&value)) {
    return fmt::format("{}", *real);
  }
  return fmt::format("{}", std::get<int64_t>(value));
}

TextCheck option_check(const OwnOption& option) {
  if (std::holds_alternative<bool>(option.value)) {
    return one_of({"true", "false"});
  }
  if (!std::holds_alternative<std::string>(option.value)) {
    return number_check(option);
  }
  if (!option.choices.empty()) return one_of(option.choices);
  return [](const std::string&) { return std::string(); };
}

std::vector<SharedOption> shared_options() {
  std::vector<SharedOption> all;
  for (const ModelInfo& model : model_list()) {
    for (const OwnOption& option : model_entry(model.name).own_options) {
      auto known = std::find_if(all.begin(), all.end(), [&](const auto& one) {
        return one.option.name == option.name;
      });
      if (known == all.end()) {
        known = all.insert(known, {option, {}, {}});
      } else {
        merge(*known, option);
      }
      known->models.push_back(model.name);
      known->defaults.push_back(option_text(option.value));
    }
  }
  return all;
}

void check_own_options(const ModelEntry& entry) {
  const std::vector<SharedOption> known = shared_options();
  std::set<std::string> names;
  for (const OwnOption& option : entry.own_options) {
    TORCH_CHECK(is_flag_name(option.name),
                "[register_model] expected options of '", entry.name,
                "' with names of lower-case letters, digits and '-', got '",
                option.name, "'");
    TORCH_CHECK(names.insert(option.name).second, "[register_model] '",
                entry.name, "' has two options '", option.name, "'");
    TORCH_CHECK(option.lowest <= option.highest,
                "[register_model] expected a range of option '", option.name,
                "' of '", entry.name, "', got ", option.lowest, " to ",
                option.highest);
    const std::string error = option_check(option)(option_text(option.value));
    TORCH_CHECK(error.empty(), "[register_model] default of option '",
                option.name, "' of '", entry.name, "': ", error);
    for (const SharedOption& other : known) {
      TORCH_CHECK(other.option.name != option.name ||
                      other.option.value.index() == option.value.index(),
                  "[register_model] option '", option.name, "' of '",
                  entry.name, "' is ", type_text(option.value), ", in '",
                  other.models.front(), "' it is ",
                  type_text(other.option.value), "; choose another name");
    }
  }
}

std::map<std::string, OptionValue> resolve_own_options(
    const ModelEntry& entry, const std::map<std::string, OptionValue>& given) {
  std::map<std::string, OptionValue> values;
  std::vector<std::string> names;
  for (const OwnOption& option : entry.own_options) {
    names.push_back(option.name);
    const auto found = given.find(option.name);
    values[option.name] =
        found == given.end() ? option.value : OptionValue(found->second);
    if (found == given.end()) continue;
    TORCH_CHECK(found->second.index() == option.value.index(), "[model ",
                entry.name, "] option ", option.name, ": expected ",
                type_text(option.value), ", got ", type_text(found->second));
    const std::string error = option_check(option)(option_text(found->second));
    TORCH_CHECK(error.empty(), "[model ", entry.name, "] option ", option.name,
                ": ", error);
  }
  for (const auto& [name, value] : given) {
    TORCH_CHECK(values.contains(name), "[model ", entry.name,
                "] has no option ", name,
                names.empty()
                    ? std::string("; it has none of its own")
                    : fmt::format("; its own are {}{}", fmt::join(names, ", "),
                                  did_you_mean(name, names)));
  }
  return values;
}

}  // namespace reprise::detail
