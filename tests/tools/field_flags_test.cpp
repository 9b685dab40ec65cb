#include "reprise/field_flags.h"

#include "support.h"

#include <nlohmann/json.hpp>

namespace reprise {
namespace {

using command::add_fields;
using testing::error_of;

/// A new option: a member and an entry, and nothing else.
enum class Flavour { kPlain, kSpicy };

struct ExtendedConfig : TrainConfig {
  int64_t exercise = 7;
  Flavour flavour = Flavour::kPlain;
};

}  // namespace

template <>
struct EnumText<Flavour> {
  static constexpr std::array<std::string_view, 2> names{"plain", "spicy"};
};

namespace {

FieldTable<ExtendedConfig> extended_fields() {
  FieldTable<ExtendedConfig> table(config_fields());
  table
      .add(&ExtendedConfig::exercise, {.name = "exercise",
                                       .group = "Training",
                                       .help = "Number of exercises",
                                       .check = whole_number(1, 9),
                                       .same_on_resume = true,
                                       .affects_costs = true})
      .add(&ExtendedConfig::flavour, {.name = "flavour",
                                      .group = "Training",
                                      .help = "Flavour of the exercises"});
  return table;
}

TEST(FieldFlags, ANewFieldNeedsNothingButItsEntry) {
  const auto table = extended_fields();
  ExtendedConfig config;
  CLI::App app;
  add_fields(app, table, config);
  const std::string help = app.help();
  EXPECT_NE(help.find("--exercise INT=7"), std::string::npos) << help;
  EXPECT_NE(help.find("Number of exercises"), std::string::npos);
  EXPECT_NE(help.find("--flavour plain|spicy=plain"), std::string::npos);

  app.parse("--exercise 3 --flavour spicy --batch 8");
  EXPECT_EQ(config.exercise, 3);
  EXPECT_EQ(config.flavour, Flavour::kSpicy);
  EXPECT_EQ(config.batch, 8);
  EXPECT_THROW(app.parse("--exercise 10"), CLI::ValidationError);
  EXPECT_THROW(app.parse("--flavour sweet"), CLI::ValidationError);

  const auto json = nlohmann::json::parse(table.to_json(config));
  EXPECT_EQ(json.at("exercise"), 3);
  EXPECT_EQ(json.at("flavour"), "spicy");
  EXPECT_TRUE(table.equal(table.from_json(json.dump()), config));

  ExtendedConfig other = config;
  other.exercise = 4;
  EXPECT_EQ(table.conflict(config, other), "exercise was 3, now 4");
  EXPECT_NE(table.cost_key(config), table.cost_key(other));
  EXPECT_EQ(table.rank_values(config).at("--flavour"), "spicy");
  other.exercise = 10;
  EXPECT_NE(error_of([&] {
              table.check(other);
            }).find("[--exercise] expected a whole number from 1 to 9"),
            std::string::npos);
}

TEST(FieldFlags, FlagsTakeTrueAndFalse) {
  TrainConfig config;
  CLI::App app;
  add_fields(app, config_fields(), config);
  app.parse("--tf32 --no-eval");
  EXPECT_TRUE(config.tf32);
  EXPECT_FALSE(config.evaluate);
  app.parse("--tf32=false");
  EXPECT_FALSE(config.tf32);
  EXPECT_THROW(app.parse("--tf32=maybe"), CLI::ConversionError);
}

TEST(FieldFlags, SizesNeedAUnit) {
  TrainConfig config;
  CLI::App app;
  add_fields(app, config_fields(), config);
  app.parse("--memory 8GiB");
  EXPECT_EQ(config.memory_limit, int64_t{8} << 30);
  EXPECT_THROW(app.parse("--memory 8"), CLI::ValidationError);
}

TEST(FieldFlags, SomeFieldsAreLeftOut) {
  TrainConfig config;
  CLI::App app;
  add_fields(app, config_fields(), config, {"graph"});
  EXPECT_EQ(app.get_option_no_throw("--graph"), nullptr);
  EXPECT_EQ(app.get_option_no_throw("--ranks"), nullptr);
  EXPECT_NE(app.get_option_no_throw("--layout"), nullptr);
}

}  // namespace
}  // namespace reprise
