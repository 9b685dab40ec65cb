// Tested by tests/study/study_file_test.cpp.
#include "base/hash.h"
#include "base/json_text.h"
#include "base/nearest.h"
#include "base/text_check.h"
#include "study/run_values.h"

#include <reprise/base/enum_text.h>
#include <reprise/study/study_file.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

namespace reprise {
namespace {

/// Flags that StudyRun::description() does not show as "flag value".
enum class DescribedFlag { kModel, kBatch, kAccumulate };

}  // namespace

template <>
struct EnumText<DescribedFlag> {
  static constexpr std::array<std::string_view, 3> names{"model", "batch",
                                                         "accumulate"};
};

namespace detail {

nlohmann::json typed(const std::string& text) {
  using nlohmann::json;
  const json value = parse_json(text);
  return value.is_number() || value.is_boolean() ? value : json(text);
}

void assign(Values& values, const std::string& flag, const std::string& value) {
  for (auto& [name, old] : values) {
    if (name == flag) {
      old = value;
      return;
    }
  }
  values.emplace_back(flag, value);
}

std::vector<std::string> constants_of(const std::vector<StudyRun>& runs) {
  std::vector<std::string> flags;
  for (const auto& one : runs.front().values) {
    if (std::all_of(runs.begin(), runs.end(), [&](const StudyRun& run) {
          return run.value(one.first) == one.second;
        })) {
      flags.push_back(one.first);
    }
  }
  return flags;
}

}  // namespace detail

using detail::assign;
using detail::constants_of;
using detail::typed;
using nlohmann::json;

void Study::set(const std::string& flag, const std::string& value) {
  TORCH_CHECK(is_utf8(value), "[study] expected ", flag, " in UTF-8");
  static const std::set<std::string> lengths = {"steps", "epochs", "seconds"};
  for (StudyRun& run : runs) {
    if (lengths.count(flag) > 0) {
      std::erase_if(run.values, [&](const auto& one) {
        return lengths.count(one.first) > 0;
      });
    }
    assign(run.values, flag, value);
  }
  // Runs that differed only in this flag are now duplicates.
  std::set<std::string> seen;
  std::erase_if(runs, [&](const StudyRun& run) {
    return !seen.insert(run.id("", "")).second;
  });
  constant = constants_of(runs);
}

void Study::only(const std::string& flag, const std::string& value) {
  std::vector<std::string> values;
  for (const StudyRun& run : runs) {
    const std::string one = run.value(flag);
    const bool known =
        std::find(values.begin(), values.end(), one) != values.end();
    if (!one.empty() && !known) values.push_back(one);
  }
  TORCH_CHECK(!values.empty(), "[study] no run sets ", flag);
  TORCH_CHECK(std::find(values.begin(), values.end(), value) != values.end(),
              "[study] no run has ", flag, " ", value, "; expected ",
              values.size() > 1 ? "one of " : "",
              fmt::format("{}", fmt::join(values, ", ")),
              did_you_mean(value, values));
  std::erase_if(runs,
                [&](const StudyRun& run) { return run.value(flag) != value; });
  constant = constants_of(runs);
}

std::string StudyRun::value(std::string_view flag) const {
  for (const auto& [name, text] : values) {
    if (name == flag) return text;
  }
  return {};
}

std::string StudyRun::case_json() const {
  json object = json::object();
  for (const auto& [flag, text] : values) {
    std::string name = flag;
    std::replace(name.begin(), name.end(), '-', '_');
    object[name] = typed(text);
  }
  return object.dump();
}

std::string StudyRun::id(const std::string& study,
                         const std::string& device) const {
  // json::object sorts its keys, so that the order of the values does not matter.
  return fmt::format("{:016x}", fnv1a(fmt::format("{}\n{}\n{}\n{}", case_json(),
                                                  repeat, study, device)));
}

std::string StudyRun::description(
    const std::vector<std::string>& common) const {
  const auto is_common = [&](const std::string& flag) {
    return std::find(common.begin(), common.end(), flag) != common.end();
  };
  const std::string accumulate = value("accumulate");
  const bool product = !value("batch").empty() && !accumulate.empty();
  std::vector<std::string> words;
  if (!label.empty()) words.push_back(label);
  for (const auto& [flag, text] : values) {
    const auto special = try_from_text<DescribedFlag>(flag);
    if (product && special == DescribedFlag::kBatch) {
      words.push_back(fmt::format("{} × {}", text, accumulate));
    } else if (product && special == DescribedFlag::kAccumulate) {
      continue;
    } else if (!is_common(flag)) {
      words.push_back(special == DescribedFlag::kModel
                          ? text
                          : fmt::format("{} {}", flag, text));
    }
  }
  if (repeat > 1) words.push_back(fmt::format("repeat {}", repeat));
  return fmt::format("{}", fmt::join(words, ", "));
}

}  // namespace reprise
