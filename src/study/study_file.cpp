#include <reprise/data/file.h>
#include <reprise/data/nearest.h>
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
#include <yaml-cpp/yaml.h>

namespace reprise {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Values = std::vector<std::pair<std::string, std::string>>;

const std::vector<std::string> kKeys = {"title",     "question", "views",
                                        "repeats",   "runs",     "shared",
                                        "reference", "timeout"};
const std::vector<std::string> kViews = {"grid", "checkpoints", "steps",
                                         "frontier"};
constexpr size_t kMostRuns = 100'000;

[[noreturn]] void fail(const YAML::Node& node, const std::string& text) {
  TORCH_CHECK(false, "[study] line ", node.Mark().line + 1, ": ", text);
}

void check_key(const YAML::Node& node, const std::string& key,
               const std::vector<std::string>& known) {
  if (std::find(known.begin(), known.end(), key) != known.end()) return;
  const std::string near = nearest(key, known);
  fail(node, fmt::format("unknown key '{}'{}", key,
                         near.empty() ? fmt::format("; known are {}",
                                                    fmt::join(known, ", "))
                                      : "; did you mean " + near + "?"));
}

std::string scalar(const YAML::Node& node, const char* what) {
  if (!node.IsScalar()) fail(node, fmt::format("expected {}", what));
  return node.Scalar();
}

double number(const YAML::Node& node, const char* what) {
  try {
    return node.as<double>();
  } catch (const YAML::Exception&) {
    fail(node, fmt::format("expected {}", what));
  }
}

/// Numbers as numbers.
json typed(const std::string& text) {
  const json value = json::parse(text, nullptr, /*allow_exceptions=*/false);
  return value.is_number() || value.is_boolean() ? value : json(text);
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

void assign(Values& values, const std::string& flag, const std::string& value) {
  for (auto& [name, old] : values) {
    if (name == flag) {
      old = value;
      return;
    }
  }
  values.emplace_back(flag, value);
}

/// The product of some flags may not pass a limit, which may depend on another.
struct AtMost {
  std::vector<std::string> of;
  std::string by;
  std::map<std::string, double> limits;  // by its value; "" for all

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

/// When to run a value of an axis: the ends first, then the middle, then the
/// middles between.
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

struct Axis {
  std::string flag;
  std::vector<std::string> values;
  std::vector<int> rounds;
};

struct Placed {
  StudyRun run;
  int round = 0;
};

class Reader {
 public:
  Reader(std::string name, const std::vector<std::string>& flags)
      : flags_(flags), block_keys_(flags) {
    study_.name = std::move(name);
    block_keys_.insert(block_keys_.end(), {"at-most", "variants"});
    variant_keys_ = flags;
    variant_keys_.push_back("label");
  }

  Study read(const std::string& text) {
    study_.text = text;
    YAML::Node root;
    try {
      root = YAML::Load(text);
    } catch (const YAML::Exception& error) {
      TORCH_CHECK(false, "[study] line ", error.mark.line + 1, ": ", error.msg);
    }
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
    order(root["repeats"]
              ? static_cast<int>(number(root["repeats"], "a number of repeats"))
              : 1);
    study_.constant = constants_of(study_.runs);
    return std::move(study_);
  }

 private:
  void read_head(const YAML::Node& root) {
    study_.title =
        root["title"] ? scalar(root["title"], "a text") : study_.name;
    if (root["question"]) study_.question = scalar(root["question"], "a text");
    if (root["timeout"]) {
      study_.timeout_s = number(root["timeout"], "a number of seconds");
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
      rule.limits[""] = number(node["limit"], "a number for limit");
    } else if (node["by"] && node["limits"] && node["limits"].IsMap()) {
      check_key(node["by"], scalar(node["by"], "a flag"), flags_);
      rule.by = node["by"].Scalar();
      for (const auto& item : node["limits"]) {
        rule.limits[item.first.Scalar()] = number(item.second, "a number");
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
      if (key == "at-most") {
        if (!item.second.IsSequence()) fail(item.second, "expected a list");
        for (const auto& rule : item.second) {
          rules.push_back(at_most_of(rule));
        }
      } else if (key != "variants") {
        add_axis(axes, item.first, item.second);
      }
    }
    std::vector<Placed> placed{Placed{}};
    // The last axes run fastest, so that what is to be compared stands together.
    for (const Axis& axis : axes) multiply(placed, axis, block);
    if (block["variants"]) vary(placed, block["variants"]);
    for (Placed& one : placed) {
      if (one.run.value("model").empty()) fail(block, "expected a model");
      const bool allowed =
          std::all_of(rules.begin(), rules.end(),
                      [&](const AtMost& rule) { return rule.allows(one.run); });
      if (allowed) all_.push_back(std::move(one));
    }
  }

  static void multiply(std::vector<Placed>& placed, const Axis& axis,
                       const YAML::Node& block) {
    std::vector<Placed> more;
    if (placed.size() * axis.values.size() > kMostRuns) {
      fail(block, fmt::format("more than {} runs", kMostRuns));
    }
    for (const Placed& one : placed) {
      for (size_t i = 0; i < axis.values.size(); ++i) {
        Placed next = one;
        assign(next.run.values, axis.flag, axis.values[i]);
        next.round += axis.rounds[i];
        more.push_back(std::move(next));
      }
    }
    placed = std::move(more);
  }

  void vary(std::vector<Placed>& placed, const YAML::Node& variants) {
    if (!variants.IsSequence()) fail(variants, "expected a list of variants");
    std::vector<Placed> more;
    for (const Placed& one : placed) {
      for (const auto& variant : variants) {
        if (!variant.IsMap()) fail(variant, "expected flags with their values");
        Placed next = one;
        for (const auto& item : variant) {
          const std::string key = item.first.Scalar();
          check_key(item.first, key, variant_keys_);
          const std::string value = scalar(item.second, "a value");
          if (key == "label") {
            next.run.label = value;
          } else {
            assign(next.run.values, key, value);
          }
        }
        more.push_back(std::move(next));
      }
    }
    placed = std::move(more);
  }

  void order(int repeats) {
    TORCH_CHECK(repeats > 0, "[study] expected repeats above 0, got ", repeats);
    std::set<std::string> seen;
    std::vector<Placed> unique;
    for (Placed& one : all_) {
      if (seen.insert(one.run.id("", "")).second)
        unique.push_back(std::move(one));
    }
    TORCH_CHECK(!unique.empty(), "[study] the rules leave no run");
    std::stable_sort(
        unique.begin(), unique.end(),
        [](const Placed& a, const Placed& b) { return a.round < b.round; });
    for (int repeat = 1; repeat <= repeats; ++repeat) {
      for (const Placed& one : unique) {
        study_.runs.push_back(one.run);
        study_.runs.back().repeat = repeat;
      }
    }
  }

  const std::vector<std::string>& flags_;
  std::vector<std::string> block_keys_, variant_keys_;
  Study study_;
  YAML::Node shared_{YAML::NodeType::Undefined};
  std::vector<Placed> all_;
};

uint64_t fnv1a(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }
  return hash;
}

}  // namespace

void Study::set(const std::string& flag, const std::string& value) {
  static const std::set<std::string> lengths = {"steps", "epochs", "seconds"};
  for (StudyRun& run : runs) {
    if (lengths.count(flag) > 0) {
      std::erase_if(run.values, [&](const auto& one) {
        return lengths.count(one.first) > 0;
      });
    }
    assign(run.values, flag, value);
  }
  // What differed in nothing else is one run now.
  std::set<std::string> seen;
  std::erase_if(runs, [&](const StudyRun& run) {
    return !seen.insert(run.id("", "")).second;
  });
  constant = constants_of(runs);
}

void Study::only(const std::string& flag, const std::string& value) {
  std::erase_if(runs,
                [&](const StudyRun& run) { return run.value(flag) != value; });
  TORCH_CHECK(!runs.empty(), "[study] no run has ", flag, " ", value);
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
  // json::object sorts its keys.
  return fmt::format("{:016x}", fnv1a(fmt::format("{}\n{}\n{}\n{}", case_json(),
                                                  repeat, study, device)));
}

std::string StudyRun::words(const std::vector<std::string>& common) const {
  const auto left_out = [&](const std::string& flag) {
    return std::find(common.begin(), common.end(), flag) != common.end();
  };
  std::vector<std::string> words;
  if (!label.empty()) words.push_back(label);
  for (const auto& [flag, text] : values) {
    if (flag == "model") {
      if (!left_out(flag)) words.push_back(text);
    } else if (flag == "batch" && !value("accumulate").empty()) {
      words.push_back(fmt::format("{} × {}", text, value("accumulate")));
    } else if (flag == "accumulate" && !value("batch").empty()) {
      continue;
    } else if (!left_out(flag)) {
      words.push_back(fmt::format("{} {}", flag, text));
    }
  }
  if (repeat > 1) words.push_back(fmt::format("repeat {}", repeat));
  return fmt::format("{}", fmt::join(words, ", "));
}

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
  TORCH_CHECK(fs::exists(path_or_name), "[study] '", path_or_name,
              "' is neither a file nor one of ",
              fmt::format("{}", fmt::join(names, ", ")), [&] {
                const std::string near = nearest(path_or_name, names);
                return near.empty() ? near : "; did you mean " + near + "?";
              }());
  return read_study(read_text(path_or_name),
                    fs::path(path_or_name).stem().string(), flags);
}

}  // namespace reprise
