#include "support.h"

#include <reprise/train/fields.h>

#include <algorithm>
#include <set>

namespace reprise {
namespace {

using testing::error_of;

/// Converts to any member of an aggregate, but not to the aggregate itself.
template <class Aggregate>
struct AnyMember {
  template <class T>
  requires(!std::is_same_v<T, Aggregate>) operator T() const;
};

template <class Aggregate, size_t... Index>
constexpr bool takes(std::index_sequence<Index...>) {
  return requires {
    Aggregate{(void(Index), AnyMember<Aggregate>{})...};
  };
}

/// Number of members of an aggregate, a base class counted as one: the largest
/// number of values that can initialize it.
template <class Aggregate, size_t Count = 0>
constexpr size_t member_count() {
  if constexpr (takes<Aggregate>(std::make_index_sequence<Count + 1>())) {
    return member_count<Aggregate, Count + 1>();
  } else {
    return Count;
  }
}

struct Three {
  int a = 0;
  std::string b{};
  std::vector<std::string> c{};
};
struct Five : Three {
  double d = 0;
  Three e{};
};
static_assert(member_count<Three>() == 3);
static_assert(member_count<Five>() == 3);

/// Returns an allowed value that is not the default.
std::string other_value(const FieldInfo& field, const std::string& present) {
  std::vector<std::string> candidates = field.choices;
  candidates.insert(candidates.end(),
                    {"true", "false", "3", "0.25", "4096", "gpt2", "sgd",
                     "sqrt", "cuda", "group", "text"});
  for (const std::string& text : candidates) {
    const bool typed =
        field.kind != FieldKind::kFlag || text == "true" || text == "false";
    const bool whole =
        text.find_first_not_of("0123456789") == std::string::npos;
    const bool number =
        text.find_first_not_of("0123456789.") == std::string::npos;
    const bool fits =
        field.kind == FieldKind::kInteger || field.kind == FieldKind::kBytes
            ? whole
        : field.kind == FieldKind::kReal ? number
                                         : typed;
    const bool allowed = !field.check || field.check(text).empty();
    if (fits && allowed && text != present) return text;
  }
  return "";
}

/// Returns a configuration in which no field has its default.
template <class Config>
Config with_other_values(const FieldTable<Config>& table) {
  Config config;
  for (const auto& field : table) {
    const std::string value = other_value(field, field.get(config));
    EXPECT_NE(value, "") << field.name;
    field.set(config, value);
  }
  return config;
}

TEST(Fields, TableContainsEveryMember) {
  // Not fields: the nested structs themselves, LrScheduleOptions::total_steps
  // and OptimizerOptions::unquantized, which the trainer computes, and
  // OptimizerOptions::groups, which are functions.
  const size_t options = member_count<TrainOptions>() - 2 +
                         member_count<OptimizerOptions>() - 2 +
                         member_count<LrScheduleOptions>() - 1;
  EXPECT_EQ(option_fields().size(), options);
  // Not fields: ModelOptions::own, whose fields are those that models register.
  const auto own = std::count_if(
      model_fields().begin(), model_fields().end(),
      [](const FieldInfo& field) { return field.absent_if_unset; });
  EXPECT_EQ(model_fields().size(),
            member_count<ModelOptions>() - 1 + static_cast<size_t>(own));
  // The base class and the options of model and adapters are counted by their own fields.
  EXPECT_EQ(config_fields().size(), member_count<TrainConfig>() - 3 + options +
                                        model_fields().size() +
                                        member_count<LoraOptions>());
}

TEST(Fields, NamesAreUniqueAndHelpTextsComplete) {
  std::set<std::string> names;
  for (const auto& field : config_fields()) {
    EXPECT_TRUE(names.insert(field.name).second) << field.name;
    EXPECT_FALSE(field.help.empty()) << field.name;
    EXPECT_FALSE(field.group.empty()) << field.name;
    EXPECT_EQ(config_fields().find(field.name), &field);
  }
  EXPECT_EQ(config_fields().find("no-such-field"), nullptr);
}

TEST(Fields, EachFieldHasItsOwnMember) {
  const TrainConfig defaults;
  for (const auto& field : config_fields()) {
    TrainConfig config;
    field.set(config, other_value(field, field.get(config)));
    for (const auto& other : config_fields()) {
      EXPECT_EQ(other.get(config) == other.get(defaults),
                other.name != field.name)
          << field.name << " changes " << other.name;
    }
  }
}

TEST(Fields, DefaultsAreAllowed) {
  EXPECT_NO_THROW(config_fields().check(TrainConfig{}));
}

TEST(Fields, JsonRoundTrip) {
  const TrainConfig config = with_other_values(config_fields());
  EXPECT_FALSE(config_fields().equal(config, {}));
  const TrainConfig back = config_from_json(to_json(config));
  EXPECT_TRUE(config_fields().equal(back, config));
  EXPECT_EQ(back.rate.base, config.rate.base);
  EXPECT_EQ(back.graph, config.graph);
}

TEST(Fields, ConflictDetectsEachFieldThatMustMatch) {
  const TrainConfig saved;
  for (const auto& field : config_fields()) {
    TrainConfig now;
    field.set(now, other_value(field, field.get(now)));
    EXPECT_EQ(config_fields().conflict(saved, now).empty(),
              !field.same_on_resume)
        << field.name;
  }
}

TEST(Fields, CostKeyDependsOnFieldsThatAffectCosts) {
  const std::string key = config_fields().cost_key({});
  for (const auto& field : config_fields()) {
    TrainConfig config;
    field.set(config, other_value(field, field.get(config)));
    EXPECT_EQ(config_fields().cost_key(config) == key, !field.affects_costs)
        << field.name;
  }
}

TEST(Fields, RanksMayDifferInMachineOptions) {
  const auto values = config_fields().rank_values({});
  EXPECT_EQ(values.count("--device"), 0u);
  EXPECT_EQ(values.count("--workers"), 0u);
  EXPECT_EQ(values.at("--precision"), "fp32");
}

TEST(Fields, StudiesCannotSetOutputOptions) {
  const auto names = config_fields().names(&FieldInfo::in_studies);
  const std::set<std::string> keys(names.begin(), names.end());
  for (const char* name : {"batch", "ranks", "no-eval", "memory"}) {
    EXPECT_EQ(keys.count(name), 1u) << name;
  }
  for (const char* name : {"keep", "save-every", "tensorboard"}) {
    EXPECT_EQ(keys.count(name), 0u) << name;
  }
}

TEST(Fields, RejectsValuesOfTheWrongType) {
  TrainConfig config;
  const auto error = [&](const char* name, const char* text) {
    return error_of([&] { config_fields().find(name)->set(config, text); });
  };
  EXPECT_NE(error("batch", "x").find("[--batch] expected a whole number"),
            std::string::npos);
  EXPECT_NE(error("workers", "99999999999").find("[--workers] expected"),
            std::string::npos);
  EXPECT_NE(error("lr", "fast").find("[--lr] expected a number"),
            std::string::npos);
  EXPECT_NE(error("tf32", "yes").find("[--tf32] expected true or false"),
            std::string::npos);
  EXPECT_NE(error("memory", "8 bananas").find("[--memory]"), std::string::npos);
  EXPECT_NE(error("graph", "of").find("did you mean off?"), std::string::npos);
}

TEST(Fields, ChecksDeviceNames) {
  for (const char* text : {"cpu", "cuda", "cuda:0", "cuda:12"}) {
    EXPECT_EQ(device_name()(text), "") << text;
  }
  for (const char* text :
       {"", "gpu", "cpu:1", "cuda:", "cuda:x", "cuda:-1", "auto", "mps"}) {
    EXPECT_NE(device_name()(text), "") << text;
  }
  EXPECT_EQ(device_name({"auto"})("auto"), "");
  EXPECT_NE(device_name()("cdua").find("did you mean cuda?"),
            std::string::npos);
}

TEST(Fields, ChecksStrategyNames) {
  const FieldCheck recompute = config_fields().find("recompute")->check;
  for (const char* text : {"none", "every:3", "optimal", "K0 K1 B1 B0"}) {
    EXPECT_EQ(recompute(text), "") << text;
  }
  EXPECT_NE(strategy_text()("optimal"), "");
  EXPECT_NE(recompute("evry:3").find("did you mean every:K?"),
            std::string::npos);
  EXPECT_EQ(recompute("every:x"),
            "expected every:N with a whole number N, got 'every:x'");
}

}  // namespace
}  // namespace reprise
