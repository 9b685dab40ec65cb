#pragma once

#include <reprise/base/enum_text.h>

#include <nlohmann/json.hpp>

#include <optional>
#include <string>

/// Types of the objects in results.jsonl. Tested by tests/study/results_test.cpp.
namespace reprise::detail {

enum class RecordType {
  kStudy,  ///< the study and its file, before the runs of each call
  kRun     ///< a run and its results
};

}  // namespace reprise::detail

template <>
struct reprise::EnumText<reprise::detail::RecordType> {
  static constexpr std::array<std::string_view, 2> names{"study", "run"};
};

namespace reprise::detail {

/// Type of a record; none if it belongs to a later version.
inline std::optional<RecordType> record_type(const nlohmann::json& record) {
  const auto type = record.find("type");
  if (type == record.end() || !type->is_string()) return std::nullopt;
  return try_from_text<RecordType>(type->get<std::string>());
}

}  // namespace reprise::detail
