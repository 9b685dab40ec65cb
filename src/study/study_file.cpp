#include "base/file.h"
#include "base/nearest.h"
#include "base/text_check.h"
#include "study/run_values.h"

#include <reprise/base/bytes.h>
#include <reprise/base/enum_text.h>
#include <reprise/study/study_file.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>
#include <yaml-cpp/depthguard.h>
#include <yaml-cpp/yaml.h>

namespace reprise {
namespace {

/// Keys of a block of runs, and of a variant, that are not flags.
enum class BlockKey { kAtMost, kVariants };
enum class VariantKey { kLabel };

}  // namespace

template <>
struct EnumText<BlockKey> {
  static constexpr std::array<std::string_view, 2> names{"at-most", "variants"};
};

template <>
struct EnumText<VariantKey> {
  static constexpr std::array<std::string_view, 1> names{"label"};
};

namespace {

namespace fs = std::filesystem;
using detail::assign;
using detail::constants_of;
using detail::typed;
using nlohmann::json;

const std::vector<std::string> kKeys = {"title",     "question", "views",
                                        "repeats",   "runs",     "shared",
                                        "reference", "timeout"};
const std::vector<std::string> kViews = {"grid", "checkpoints", "ranks",
                                         "steps", "frontier"};
constexpr size_t kMaxRuns = 100'000;
constexpr size_t kMaxNodes = 200'000;
constexpr int kMaxDepth = 20;
constexpr uint64_t kMaxFileBytes = 1 << 20;
constexpr size_t kMaxTextBytes = size_t{16} << 20;  // with aliases
constexpr size_t kMaxRunsBytes = size_t{256} << 20;
constexpr const char* kTooLarge =
    "the file is nested too deeply, or its aliases make it too large";

[[noreturn]] void fail(const YAML::Node& node, const std::string& text) {
  TORCH_CHECK(false, "[study] line ", node.Mark().line + 1, ": ", text);
}

void check_key(const YAML::Node& node, const std::string& key,
               const std::vector<std::string>& known) {
  if (std::find(known.begin(), known.end(), key) != known.end()) return;
  const std::string hint = did_you_mean(key, known);
  fail(node, fmt::format("unknown key {}{}", in_quotes(key),
                         hint.empty() ? fmt::format("; expected one of {}",
                                                    fmt::join(known, ", "))
                                      : hint));
}

/// Size of a file if each alias is replaced by what it stands for.
struct TreeSize {
  size_t nodes = 0;
  size_t bytes = 0;  // of texts
};

/// Rejects duplicate keys and recursive aliases, which yaml-cpp accepts.
void check_tree(const YAML::Node& node, TreeSize& size, int depth = 0) {
  if (node.IsScalar()) size.bytes += node.Scalar().size();
  if (depth > kMaxDepth || ++size.nodes > kMaxNodes ||
      size.bytes > kMaxTextBytes) {
    fail(node, kTooLarge);
  }
  std::set<std::string> keys;
  for (const auto& item : node) {
    if (!node.IsMap()) {
      check_tree(item, size, depth + 1);
      continue;
    }
    if (!item.first.IsScalar()) fail(item.first, "expected a name as the key");
    if (!keys.insert(item.first.Scalar()).second) {
      fail(item.first, fmt::format("the key {} occurs twice; remove one",
                                   in_quotes(item.first.Scalar())));
    }
    size.bytes += item.first.Scalar().size();
    check_tree(item.second, size, depth + 1);
  }
}

std::string scalar(const YAML::Node& node, const char* what) {
  if (!node.IsScalar()) fail(node, fmt::format("expected {}", what));
  return node.Scalar();
}

/// Reads a number that passes `check`. `what` is its key.
double number(const YAML::Node& node, const std::string& what,
              const TextCheck& check) {
  const std::string text = scalar(node, (what + ": a number").c_str());
  const std::string error = check(text);
  if (!error.empty()) fail(node, fmt::format("{}: {}", what, error));
  return std::strtod(text.c_str(), nullptr);
}

double limit_of(const YAML::Node& node) {
  return number(node, "limit", real_number(0, 1e18));
}

json to_json(const YAML::Node& node) {
  switch (node.Type()) {
    case YAML::NodeType::Scalar:
      return typed(node.Scalar());
    case YAML::NodeType::Sequence: {
      json list = json::array();
      for (const auto& item : node) list.push_back(to_json(item));
      return list;
    }
    case YAML::NodeType::Map: {
      json map = json::object();
      for (const auto& item : node) {
        std::string key = item.first.Scalar();
        std::replace(key.begin(), key.end(), '-', '_');
        map[key] = to_json(item.second);
      }
      return map;
    }
    default:
      return nullptr;
  }
}

/// A rule that bounds the product of the flags `of`. The limit may depend on the value
/// of the flag `by`.
struct AtMost {
  std::vector<std::string> of;
  std::string by;
  std::map<std::string, double>
      limits;  // by the value of `by`; "" if there is only one limit

  bool allows(const StudyRun& run) const {
    const auto limit = limits.find(by.empty() ? "" : run.value(by));
    if (limit == limits.end()) return true;
    double product = 1;
    for (const auto& flag : of) {
      const std::string text = run.value(flag);
      if (!text.empty()) product *= std::strtod(text.c_str(), nullptr);
    }
    return product <= limit->second;
  }
};

/// The round in which each value of an axis is run: first the ends, then the middle,
/// then the middles in between.
std::vector<int> rounds_of(size_t count) {
  std::vector<int> rounds(count, 0);
  std::vector<std::pair<size_t, size_t>> gaps{{0, count == 0 ? 0 : count - 1}};
  for (int round = 1; !gaps.empty(); ++round) {
    std::vector<std::pair<size_t, size_t>> next;
    for (const auto& [low, high] : gaps) {
      if (high < low + 2) continue;
      const size_t middle = (low + high) / 2;
      rounds[middle] = round;
      next.emplace_back(low, middle);
      next.emplace_back(middle, high);
    }
    gaps = std::move(next);
  }
  return rounds;
}

bool is_number(const std::string& text) {
  char* end = nullptr;
  std::strtod(text.c_str(), &end);
  return !text.empty() && *end == '\0';
}

struct Axis {
  std::string flag;
  std::vector<std::string> values;
  std::vector<int> rounds;
};

struct OrderedRun {
  StudyRun run;
  int round = 0;
};

class Reader {
 public:
  Reader(std::string name, const std::vector<std::string>& flags)
      : flags_(flags), block_keys_(flags) {
    study_.name = std::move(name);
    for (const auto& key : names_of<BlockKey>()) block_keys_.push_back(key);
    variant_keys_ = flags;
    for (const auto& key : names_of<VariantKey>()) variant_keys_.push_back(key);
  }

  Study read(const std::string& text) {
    study_.text = text;
    TORCH_CHECK(is_utf8(text), "[study] expected text in UTF-8");
    YAML::Node root;
    try {
      root = YAML::Load(text);
    } catch (const YAML::DeepRecursion& error) {
      TORCH_CHECK(false, "[study] line ", error.mark.line + 1, ": ", kTooLarge);
    } catch (const YAML::Exception& error) {
      TORCH_CHECK(false, "[study] line ", error.mark.line + 1, ": ", error.msg);
    }
    TreeSize size;
    check_tree(root, size);
    TORCH_CHECK(root.IsMap(), "[study] expected keys such as title and runs");
    for (const auto& item : root) {
      check_key(item.first, item.first.Scalar(), kKeys);
    }
    read_head(root);
    if (root["shared"]) shared_ = root["shared"];
    const YAML::Node runs = root["runs"];
    TORCH_CHECK(runs && runs.IsSequence() && runs.size() > 0,
                "[study] expected runs: a list of blocks, each with a model");
    for (const auto& block : runs) read_block(block);
    order(root["repeats"] ? static_cast<int>(number(root["repeats"], "repeats",
                                                    whole_number(1, 1000)))
                          : 1,
          root);
    study_.constant = constants_of(study_.runs);
    return std::move(study_);
  }

 private:
  void read_head(const YAML::Node& root) {
    study_.title =
        root["title"] ? scalar(root["title"], "a text") : study_.name;
    if (root["question"]) study_.question = scalar(root["question"], "a text");
    if (root["timeout"]) {
      study_.timeout_s =
          number(root["timeout"], "timeout", real_number(0, 1e7, Ends::kNone));
    }
    if (root["reference"]) study_.reference = to_json(root["reference"]).dump();
    if (!root["views"]) return;
    if (!root["views"].IsSequence()) fail(root["views"], "expected a list");
    for (const auto& view : root["views"]) {
      check_key(view, scalar(view, "the name of a view"), kViews);
      study_.views.push_back(view.Scalar());
    }
  }

  Axis axis_of(const std::string& flag, const YAML::Node& node) {
    Axis axis{flag, {}, {}};
    if (node.IsScalar()) {
      axis.values.push_back(node.Scalar());
    } else if (node.IsSequence() && node.size() > 0) {
      for (const auto& value : node) {
        axis.values.push_back(scalar(value, "a value, or a list of values"));
      }
    } else {
      fail(node,
           fmt::format("expected a value or a list of values for {}", flag));
    }
    const bool ordered =
        std::all_of(axis.values.begin(), axis.values.end(), is_number);
    axis.rounds = ordered ? rounds_of(axis.values.size())
                          : std::vector<int>(axis.values.size(), 0);
    return axis;
  }

  void add_axis(std::vector<Axis>& axes, const YAML::Node& key,
                const YAML::Node& value) {
    const std::string flag = key.Scalar();
    check_key(key, flag, flags_);
    Axis axis = axis_of(flag, value);
    for (Axis& known : axes) {
      if (known.flag == flag) {
        known = std::move(axis);
        return;
      }
    }
    axes.push_back(std::move(axis));
  }

  AtMost at_most_of(const YAML::Node& node) {
    static const std::vector<std::string> keys = {"of", "by", "limit",
                                                  "limits"};
    if (!node.IsMap()) fail(node, "expected at-most: {of: [...], limit: N}");
    for (const auto& item : node) {
      check_key(item.first, item.first.Scalar(), keys);
    }
    AtMost rule;
    if (!node["of"] || !node["of"].IsSequence()) {
      fail(node, "expected of: the flags whose product is bounded");
    }
    for (const auto& flag : node["of"]) {
      check_key(flag, scalar(flag, "a flag"), flags_);
      rule.of.push_back(flag.Scalar());
    }
    if (node["limit"]) {
      rule.limits[""] = limit_of(node["limit"]);
    } else if (node["by"] && node["limits"] && node["limits"].IsMap()) {
      check_key(node["by"], scalar(node["by"], "a flag"), flags_);
      rule.by = node["by"].Scalar();
      for (const auto& item : node["limits"]) {
        rule.limits[item.first.Scalar()] = limit_of(item.second);
      }
    } else {
      fail(node, "expected limit: N, or by: FLAG with limits: {VALUE: N, …}");
    }
    return rule;
  }

  void read_block(const YAML::Node& block) {
    if (!block.IsMap()) fail(block, "expected a block with a model");
    std::vector<Axis> axes;
    std::vector<AtMost> rules;
    if (shared_) {
      if (!shared_.IsMap()) fail(shared_, "expected flags with their values");
      for (const auto& item : shared_) add_axis(axes, item.first, item.second);
    }
    for (const auto& item : block) {
      const std::string key = item.first.Scalar();
      check_key(item.first, key, block_keys_);
      const auto own = try_from_text<BlockKey>(key);
      if (!own) add_axis(axes, item.first, item.second);
      if (own != BlockKey::kAtMost) continue;
      if (!item.second.IsSequence()) fail(item.second, "expected a list");
      for (const auto& rule : item.second) rules.push_back(at_most_of(rule));
    }
    std::vector<OrderedRun> ordered{OrderedRun{}};
    // The last axes vary fastest, so that runs to be compared are adjacent.
    for (const Axis& axis : axes) multiply(ordered, axis, block);
    const auto variants = block[to_text(BlockKey::kVariants)];
    if (variants) vary(ordered, variants);
    for (OrderedRun& one : ordered) {
      if (one.run.value("model").empty()) fail(block, "expected a model");
      const bool allowed =
          std::all_of(rules.begin(), rules.end(),
                      [&](const AtMost& rule) { return rule.allows(one.run); });
      if (allowed) all_.push_back(std::move(one));
    }
  }

  /// `like` is one of the `count` runs; the others take about as much memory.
  static void check_count(size_t count, const StudyRun& like,
                          const YAML::Node& block) {
    if (count > kMaxRuns) {
      fail(block,
           fmt::format("expected at most {} runs, got {}", kMaxRuns, count));
    }
    size_t bytes = sizeof(StudyRun) + like.label.size();
    for (const auto& [flag, value] : like.values) {
      bytes += sizeof(like.values[0]) + flag.size() + value.size();
    }
    if (bytes > kMaxRunsBytes / count) {
      fail(block, fmt::format("{} runs with values this long take more than {}",
                              count, format_bytes(kMaxRunsBytes)));
    }
  }

  static void multiply(std::vector<OrderedRun>& ordered, const Axis& axis,
                       const YAML::Node& block) {
    std::vector<OrderedRun> more;
    StudyRun longest = ordered.front().run;
    assign(longest.values, axis.flag,
           *std::max_element(axis.values.begin(), axis.values.end(),
                             [](const auto& a, const auto& b) {
                               return a.size() < b.size();
                             }));
    check_count(ordered.size() * axis.values.size(), longest, block);
    for (const OrderedRun& one : ordered) {
      for (size_t i = 0; i < axis.values.size(); ++i) {
        OrderedRun next = one;
        assign(next.run.values, axis.flag, axis.values[i]);
        next.round += axis.rounds[i];
        more.push_back(std::move(next));
      }
    }
    ordered = std::move(more);
  }

  void vary(std::vector<OrderedRun>& ordered, const YAML::Node& variants) {
    if (!variants.IsSequence()) fail(variants, "expected a list of variants");
    if (variants.size() == 0) fail(variants, "expected a list of variants");
    check_count(ordered.size() * variants.size(), ordered.front().run,
                variants);
    std::vector<OrderedRun> more;
    for (const OrderedRun& one : ordered) {
      for (const auto& variant : variants) {
        if (!variant.IsMap()) fail(variant, "expected flags with their values");
        OrderedRun next = one;
        for (const auto& item : variant) {
          const std::string key = item.first.Scalar();
          check_key(item.first, key, variant_keys_);
          const std::string value = scalar(item.second, "a value");
          if (try_from_text<VariantKey>(key) == VariantKey::kLabel) {
            next.run.label = value;
          } else {
            assign(next.run.values, key, value);
          }
        }
        more.push_back(std::move(next));
      }
    }
    ordered = std::move(more);
  }

  void order(int repeats, const YAML::Node& root) {
    std::set<std::string> seen;
    std::vector<OrderedRun> unique;
    for (OrderedRun& one : all_) {
      if (seen.insert(one.run.id("", "")).second)
        unique.push_back(std::move(one));
    }
    TORCH_CHECK(!unique.empty(), "[study] the rules leave no run");
    const size_t total = unique.size() * static_cast<size_t>(repeats);
    TORCH_CHECK(total <= kMaxRuns, "[study] expected at most ", kMaxRuns,
                " runs, got ", total);
    check_count(total, unique.front().run, root);
    std::stable_sort(unique.begin(), unique.end(),
                     [](const OrderedRun& a, const OrderedRun& b) {
                       return a.round < b.round;
                     });
    for (int repeat = 1; repeat <= repeats; ++repeat) {
      for (const OrderedRun& one : unique) {
        study_.runs.push_back(one.run);
        study_.runs.back().repeat = repeat;
      }
    }
  }

  const std::vector<std::string>& flags_;
  std::vector<std::string> block_keys_, variant_keys_;
  Study study_;
  YAML::Node shared_{YAML::NodeType::Undefined};
  std::vector<OrderedRun> all_;
};

}  // namespace

Study read_study(const std::string& text, const std::string& name,
                 const std::vector<std::string>& flags) {
  return Reader(name, flags).read(text);
}

Study open_study(const std::string& path_or_name,
                 const std::vector<std::string>& flags) {
  std::vector<std::string> names;
  for (const auto& [name, text] : shipped_studies()) {
    if (name == path_or_name) return read_study(text, name, flags);
    names.push_back(name);
  }
  std::error_code error;
  const bool missing =
      fs::status(path_or_name, error).type() == fs::file_type::not_found;
  TORCH_CHECK(!missing, "[study] '", path_or_name,
              "' is neither a file nor a built-in study: ",
              fmt::format("{}", fmt::join(names, ", ")),
              did_you_mean(path_or_name, names));
  TORCH_CHECK(!fs::is_directory(path_or_name, error),
              "[study] expected a study file, ", path_or_name,
              " is a directory");
  const std::string content = read_text(path_or_name, kMaxFileBytes);
  try {
    return read_study(content, fs::path(path_or_name).stem().string(), flags);
  } catch (const c10::Error& error) {
    const std::string text = without_origin(error.what_without_backtrace());
    TORCH_CHECK(false, "[study] ", path_or_name,
                text.starts_with("line ") ? ", " : ": ", text);
  }
}

}  // namespace reprise
