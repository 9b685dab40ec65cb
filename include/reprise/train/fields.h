#pragma once

#include <reprise/base/enum_text.h>
#include <reprise/train/config.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

/// The table of configuration fields. Each field is described once; the command
/// line, JSON, validation, the check on resume, the key of cached costs, the
/// agreement of ranks and the keys of studies are generated from its entry.
///
/// To add an option, add a member to TrainOptions or TrainConfig and an entry to the
/// table in src/train/config.
namespace reprise {

/// Returns "" if the value `text` is allowed, else what was expected and what was
/// given: "expected one of auto, on, off, got 'yes'".
using FieldCheck = std::function<std::string(const std::string& text)>;

enum class FieldKind { kFlag, kInteger, kReal, kBytes, kText, kChoice };

/// Description of a field.
struct FieldInfo {
  std::string name{};   ///< flag without dashes, key in JSON and in studies
  std::string group{};  ///< heading in --help
  std::string help{};
  FieldCheck check{};  ///< allowed values; null: any
  /// Value, as text, that means "not given"; not subject to `check`. Texts: "".
  std::optional<std::string> unset{};
  /// In --help; empty: by kind. If it is FILE, DIR or PATH, or NAME|PATH, shells
  /// complete paths.
  std::string metavar{};
  bool same_on_resume =
      false;  ///< a run that continues must have the same value
  bool affects_costs = false;        ///< part of the key of cached measurements
  bool same_on_ranks = true;         ///< all ranks of a training must agree
  bool in_studies = true;            ///< may be set by a study
  bool on_command_line = true;       ///< has a flag of `reprise train`
  bool needs_run_directory = false;  ///< has no effect if nothing is saved
  bool absent_if_unset = false;      ///< not in JSON if it is not given
  FieldKind kind = FieldKind::kText;  ///< set by FieldTable::add()
  /// All values of an enum, set likewise. For texts, the words that shells complete;
  /// "every:K" stands for "every:".
  std::vector<std::string> choices{};
};

/// A field of the struct `Config`. Values are exchanged as text: numbers in decimal
/// digits, sizes in bytes, flags as true or false.
template <class Config>
struct Field : FieldInfo {
  std::function<std::string(const Config&)> get;
  /// Throws c10::Error with the flag's name if the text is not a value.
  std::function<void(Config&, const std::string& text)> set;

  /// False if the value is the one that means "not given".
  bool given(const Config& config) const {
    return !unset || get(config) != *unset;
  }
};

namespace detail {

struct FieldValue {
  const FieldInfo* info;
  std::string text;
};

std::string integer_text(int64_t value);
std::string integer_text(uint64_t value);
std::string real_text(double value);
int64_t parse_integer(const FieldInfo& field, const std::string& text,
                      int64_t low, int64_t high);
uint64_t parse_unsigned(const FieldInfo& field, const std::string& text);
int64_t parse_size(const FieldInfo& field, const std::string& text);
double parse_real(const FieldInfo& field, const std::string& text);
bool parse_flag(const FieldInfo& field, const std::string& text);
[[noreturn]] void refuse(const FieldInfo& field, const std::string& error);

/// Value of a member as text, and back.
template <class T>
std::string value_text(const T& value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value ? "true" : "false";
  } else if constexpr (NamedEnum<T>) {
    return to_text(value);
  } else if constexpr (std::is_same_v<T, uint64_t>) {
    return integer_text(value);
  } else if constexpr (std::is_integral_v<T>) {
    return integer_text(static_cast<int64_t>(value));
  } else if constexpr (std::is_floating_point_v<T>) {
    return real_text(value);
  } else {
    return value;
  }
}

template <class T>
T parse_value(const FieldInfo& field, const std::string& text) {
  if constexpr (std::is_same_v<T, bool>) {
    return parse_flag(field, text);
  } else if constexpr (NamedEnum<T>) {
    const std::string error = field.check(text);
    if (!error.empty()) refuse(field, error);
    return from_text<T>(text);
  } else if constexpr (std::is_same_v<T, uint64_t>) {
    return parse_unsigned(field, text);
  } else if constexpr (std::is_integral_v<T>) {
    if (field.kind == FieldKind::kBytes) return parse_size(field, text);
    return static_cast<T>(parse_integer(field, text,
                                        std::numeric_limits<T>::min(),
                                        std::numeric_limits<T>::max()));
  } else if constexpr (std::is_floating_point_v<T>) {
    return parse_real(field, text);
  } else {
    return text;
  }
}

template <class T>
constexpr FieldKind kind_of() {
  if (std::is_same_v<T, bool>) return FieldKind::kFlag;
  if (std::is_enum_v<T>) return FieldKind::kChoice;
  if (std::is_integral_v<T>) return FieldKind::kInteger;
  if (std::is_floating_point_v<T>) return FieldKind::kReal;
  return FieldKind::kText;
}

FieldCheck choice_check(std::vector<std::string> names);
void check_value(const FieldValue& value);
std::string to_json(const std::vector<FieldValue>& values);
/// Texts of the fields that are in `json`, by name.
std::map<std::string, std::string> from_json(
    const std::string& json, const std::vector<const FieldInfo*>& fields);
std::string difference(const FieldValue& before, const FieldValue& after);

}  // namespace detail

/// Fields of the struct `Config`, in the order of --help.
template <class Config>
class FieldTable {
 public:
  FieldTable() = default;

  /// The fields of a base class of `Config`.
  template <class Base>
  requires(
      std::derived_from<Config, Base> &&
      !std::same_as<Config, Base>) explicit FieldTable(const FieldTable<Base>&
                                                           base) {
    add_all(base);
  }

  /// Adds a field that is no member.
  FieldTable& add(Field<Config> field) {
    fields_.push_back(std::move(field));
    return *this;
  }

  /// Adds the member `member`. Enums get their names as allowed values.
  template <class T, class Owner>
  FieldTable& add(T Owner::*member, FieldInfo info) {
    return add_accessor<T>(
        [member](const Config& c) -> const T& { return c.*member; },
        [member](Config& c, T value) { c.*member = std::move(value); },
        std::move(info));
  }

  /// Adds a member that holds a number of bytes.
  template <class Owner>
  FieldTable& add_bytes(int64_t Owner::*member, FieldInfo info) {
    info.kind = FieldKind::kBytes;
    return add(member, std::move(info));
  }

  /// Adds a flag that is set if the member `member` is false.
  template <class Owner>
  FieldTable& add_negated(bool Owner::*member, FieldInfo info) {
    return add_accessor<bool>(
        [member](const Config& c) { return !(c.*member); },
        [member](Config& c, bool value) { c.*member = !value; },
        std::move(info));
  }

  /// Adds the fields of a base class.
  template <class Base>
  requires std::derived_from<Config, Base> FieldTable& add_all(
      const FieldTable<Base>& base) {
    for (const Field<Base>& field : base) {
      fields_.push_back({FieldInfo(field), field.get, field.set});
    }
    return *this;
  }

  /// Adds the fields of the struct that is the member `member`.
  template <class Part, class Owner>
  FieldTable& add_part(Part Owner::*member, const FieldTable<Part>& part) {
    for (const Field<Part>& field : part) {
      fields_.push_back(
          {FieldInfo(field),
           [member, get = field.get](const Config& c) {
             return get(c.*member);
           },
           [member, set = field.set](Config& c, const std::string& text) {
             set(c.*member, text);
           }});
    }
    return *this;
  }

  auto begin() const { return fields_.begin(); }
  auto end() const { return fields_.end(); }
  size_t size() const { return fields_.size(); }

  /// Field with this name; null if there is none.
  const Field<Config>* find(std::string_view name) const {
    for (const auto& field : fields_) {
      if (field.name == name) return &field;
    }
    return nullptr;
  }

  /// Names of the fields with the property `property`, such as
  /// &FieldInfo::in_studies.
  std::vector<std::string> names(bool FieldInfo::*property) const {
    std::vector<std::string> names;
    for (const auto& field : fields_) {
      if (field.*property) names.push_back(field.name);
    }
    return names;
  }

  /// Throws c10::Error, with the flag's name in brackets, if a value is not allowed.
  void check(const Config& config) const {
    for (const auto& field : fields_) {
      if (field.given(config)) {
        detail::check_value({&field, field.get(config)});
      }
    }
  }

  /// JSON object with one key per field, except FieldInfo::absent_if_unset.
  std::string to_json(const Config& config) const {
    std::vector<detail::FieldValue> values;
    for (const auto& field : fields_) {
      if (field.absent_if_unset && !field.given(config)) continue;
      values.push_back({&field, field.get(config)});
    }
    return detail::to_json(values);
  }

  /// Reads such an object. Throws c10::Error if a field is missing that must match
  /// on resume, or if a value has another type; other missing fields get their
  /// defaults.
  Config from_json(const std::string& json) const {
    std::vector<const FieldInfo*> infos;
    for (const auto& field : fields_) infos.push_back(&field);
    const auto texts = detail::from_json(json, infos);
    Config config;
    for (const auto& field : fields_) {
      const auto found = texts.find(field.name);
      if (found != texts.end()) field.set(config, found->second);
    }
    return config;
  }

  /// The first field that must match on resume but differs; empty: there is none.
  std::string conflict(const Config& saved, const Config& now) const {
    for (const auto& field : fields_) {
      if (!field.same_on_resume || field.get(saved) == field.get(now)) continue;
      return detail::difference({&field, field.get(saved)},
                                {&field, field.get(now)});
    }
    return "";
  }

  /// Names and values of the fields that measured costs depend on.
  std::string cost_key(const Config& config) const {
    std::string key;
    for (const auto& field : fields_) {
      if (!field.affects_costs) continue;
      key += (key.empty() ? "" : " ") + field.name + "=" + field.get(config);
    }
    return key;
  }

  /// Values that all ranks must agree on, by flag.
  std::map<std::string, std::string> rank_values(const Config& config) const {
    std::map<std::string, std::string> values;
    for (const auto& field : fields_) {
      if (field.same_on_ranks) values["--" + field.name] = field.get(config);
    }
    return values;
  }

  /// True if all fields are equal.
  bool equal(const Config& a, const Config& b) const {
    for (const auto& field : fields_) {
      if (field.get(a) != field.get(b)) return false;
    }
    return true;
  }

 private:
  template <class T, class Get, class Set>
  FieldTable& add_accessor(Get get, Set set, FieldInfo info) {
    if (info.kind != FieldKind::kBytes) info.kind = detail::kind_of<T>();
    if constexpr (NamedEnum<T>) {
      info.choices = names_of<T>();
      if (!info.check) info.check = detail::choice_check(info.choices);
    }
    if constexpr (std::is_same_v<T, std::string>) {
      if (!info.unset) info.unset = "";
    }
    Field<Config> field{std::move(info), nullptr, nullptr};
    field.get = [get](const Config& c) {
      return detail::value_text<T>(get(c));
    };
    field.set = [set, info = FieldInfo(field)](Config& c,
                                               const std::string& text) {
      set(c, detail::parse_value<T>(info, text));
    };
    fields_.push_back(std::move(field));
    return *this;
  }

  std::vector<Field<Config>> fields_;
};

/// Options of models: sizes of the built-in ones, and ModelEntry::own_options of all that
/// are registered. If another model or dataset is registered later, the next call returns
/// another table; earlier ones stay valid. Throws c10::Error if an option has the name of a
/// field of TrainConfig.
const FieldTable<ModelOptions>& model_fields();

/// Options of a training.
const FieldTable<TrainOptions>& option_fields();

/// Everything that describes a training by name; model_fields() applies.
const FieldTable<TrainConfig>& config_fields();

/// cpu, cuda or cuda:N, or one of `also`. Does not look for the device.
FieldCheck device_name(std::vector<std::string> also = {});

/// A Strategy, or one of `also`.
FieldCheck strategy_text(std::vector<std::string> also = {});

}  // namespace reprise
