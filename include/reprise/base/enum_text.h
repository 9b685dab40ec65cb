#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

/// Conversion between enums and their names on the command line and in JSON.
namespace reprise {

/// Names of the values of the enum `E`. A specialization has one member, `names`,
/// an array of std::string_view in the order of the values, which count from 0:
///
///     template <>
///     struct EnumText<Precision> {
///       static constexpr std::array<std::string_view, 3> names{"fp32", "bf16",
///                                                              "fp16"};
///     };
template <class E>
struct EnumText;

/// An enum that has names.
template <class E>
concept NamedEnum = std::is_enum_v<E> && requires {
  EnumText<E>::names.size();
};

/// All names of `E`, in the order of its values.
template <NamedEnum E>
std::vector<std::string> names_of() {
  return {EnumText<E>::names.begin(), EnumText<E>::names.end()};
}

/// Name of `value`.
template <NamedEnum E>
std::string to_text(E value) {
  return std::string(EnumText<E>::names.at(static_cast<size_t>(value)));
}

/// Position of `text` in `names`. Throws reprise::Error if it is not among them: the
/// message lists them and suggests the nearest one.
size_t index_of_name(std::string_view text,
                     const std::vector<std::string>& names);

/// Value named `text`. Throws reprise::Error as index_of_name() does.
template <NamedEnum E>
E from_text(std::string_view text) {
  return static_cast<E>(index_of_name(text, names_of<E>()));
}

/// Value named `text`; none if there is no such name.
template <NamedEnum E>
std::optional<E> try_from_text(std::string_view text) {
  for (size_t i = 0; i < EnumText<E>::names.size(); ++i) {
    if (EnumText<E>::names[i] == text) return static_cast<E>(i);
  }
  return std::nullopt;
}

}  // namespace reprise
