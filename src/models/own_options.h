#pragma once

#include "base/text_check.h"

#include <reprise/models/registry.h>

#include <string>
#include <vector>

/// Options that models have registered for themselves.
/// Tested by tests/models/registry_test.cpp.
namespace reprise::detail {

/// An option with the models that have it. If they differ, the range and the choices are
/// those that at least one model allows.
struct SharedOption {
  OwnOption option;
  std::vector<std::string> models;
  std::vector<std::string> defaults;  ///< as text, one per model
};

/// The options of all registered models, in the order of their registration.
std::vector<SharedOption> shared_options();

/// A value as text: numbers in decimal digits, flags as true or false.
std::string option_text(const OptionValue& value);

/// Allowed values of an option.
TextCheck option_check(const OwnOption& option);

/// Throws c10::Error if names or defaults of the options are wrong, or if an option has
/// another type in a model that is registered.
void check_own_options(const ModelEntry& entry);

/// Adds the defaults of `entry` to `given`. Throws c10::Error on options that the model
/// does not have and on values that it does not allow.
std::map<std::string, OptionValue> resolve_own_options(
    const ModelEntry& entry, const std::map<std::string, OptionValue>& given);

}  // namespace reprise::detail
