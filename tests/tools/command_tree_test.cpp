#include "reprise/command_tree.h"

#include "reprise/field_flags.h"
#include "support.h"

#include <reprise/train/fields.h>

namespace reprise {
namespace {

using command::describe;
using command::FlagEntry;

enum class Taste { kSweet, kSour };

}  // namespace

template <>
struct EnumText<Taste> {
  static constexpr std::array<std::string_view, 2> names{"sweet", "sour"};
};

namespace {

const FlagEntry& flag_of(const command::CommandEntry& command,
                         const std::string& name) {
  for (const FlagEntry& flag : command.flags) {
    for (const auto& one : flag.names) {
      if (one == name) return flag;
    }
  }
  throw std::runtime_error("no flag " + name);
}

TEST(CommandTree, DescribesWhatTheAppHas) {
  CLI::App app("A program.", "program");
  CLI::App* eat = app.add_subcommand("eat", "Eat something");
  Taste taste = Taste::kSour;
  command::add_choice(*eat, "--taste", taste, "Taste; the first is better");
  bool fast = false;
  eat->add_flag("--fast", fast, "Eat fast");
  int pieces = 1;
  eat->add_option("-n,--pieces", pieces, "Number of pieces")->required();
  std::vector<std::string> two;
  eat->add_option("--both", two, "Two files")->expected(2)->type_name("FILE");
  std::string drink;
  eat->add_option("--drink", drink, "A drink")->expected(0, 1);
  std::string meal;
  eat->add_option("meal", meal, "What to eat")->type_name("NAME|DIR");

  const auto tree = describe(app);
  ASSERT_EQ(tree.subcommands.size(), 1U);
  const auto& command = tree.subcommands[0];
  EXPECT_EQ(command.name, "eat");
  EXPECT_EQ(command.help, "Eat something");
  EXPECT_EQ(flag_of(command, "--help").values, 0);
  EXPECT_EQ(flag_of(command, "--fast").values, 0);
  EXPECT_EQ(flag_of(command, "--fast").placeholder, "");

  const FlagEntry& chosen = flag_of(command, "--taste");
  EXPECT_EQ(chosen.words, (std::vector<std::string>{"sweet", "sour"}));
  EXPECT_EQ(chosen.placeholder, "sweet|sour");
  EXPECT_EQ(chosen.default_value, "sour");
  EXPECT_EQ(chosen.values, 1);
  const FlagEntry& number = flag_of(command, "-n");
  EXPECT_EQ(number.names, (std::vector<std::string>{"-n", "--pieces"}));
  EXPECT_TRUE(number.required);
  const FlagEntry& files = flag_of(command, "--both");
  EXPECT_EQ(files.values, 2);
  EXPECT_TRUE(files.takes_files);
  EXPECT_FALSE(files.takes_directories);
  EXPECT_TRUE(flag_of(command, "--drink").optional_value);
  ASSERT_EQ(command.arguments.size(), 1U);
  EXPECT_TRUE(command.arguments[0].names.empty());
  EXPECT_TRUE(command.arguments[0].takes_directories);
  EXPECT_FALSE(command.arguments[0].takes_files);
}

TEST(CommandTree, WordsWithANumberEndInAColon) {
  TrainConfig config;
  CLI::App app;
  command::add_fields(app, config_fields(), config);
  const auto tree = describe(app);
  const auto& words = flag_of(tree.program, "--recompute").words;
  EXPECT_NE(std::find(words.begin(), words.end(), "every:"), words.end());
  EXPECT_NE(std::find(words.begin(), words.end(), "optimal"), words.end());
  EXPECT_TRUE(flag_of(tree.program, "--data").takes_files);
  EXPECT_TRUE(flag_of(tree.program, "--adapter").takes_directories);
  EXPECT_FALSE(flag_of(tree.program, "--adapter").takes_files);
}

/// Fields whose placeholder names neither a type nor values have words to complete.
TEST(CommandTree, FieldsWithNamedValuesHaveWords) {
  for (const auto& field : config_fields()) {
    const bool named = field.kind == FieldKind::kChoice ||
                       field.metavar == "NAME" || field.metavar == "DEVICE" ||
                       field.metavar == "STRATEGY" ||
                       field.metavar.find('|') != std::string::npos;
    EXPECT_EQ(named && field.choices.empty(), false) << field.name;
    for (const auto& word : field.choices) {
      if (!field.check || word.find(':') != std::string::npos) continue;
      EXPECT_EQ(field.check(word), "") << field.name;
    }
  }
}

TEST(CommandTree, ShortHelpEndsWithTheFirstStatement) {
  EXPECT_EQ(command::short_help("Number of blocks"), "Number of blocks");
  EXPECT_EQ(command::short_help("Model:\n  mlp"), "Model");
  EXPECT_EQ(command::short_help("Seed (default 1)"), "Seed");
  EXPECT_EQ(command::short_help("cuda:N; auto: any"), "cuda:N");
}

TEST(CommandTree, WordsChangeNeitherHelpNorChecks) {
  std::string value;
  CLI::App app;
  CLI::Option* option = app.add_option("--name", value, "A name");
  const std::string before = app.help();
  command::set_words(option, {"a", "b"});
  EXPECT_EQ(app.help(), before);
  app.parse("--name other");
  EXPECT_EQ(value, "other");
  EXPECT_EQ(command::words_of(*option), (std::vector<std::string>{"a", "b"}));
  command::set_words(option, {"c"});
  EXPECT_EQ(command::words_of(*option), (std::vector<std::string>{"c"}));
}

}  // namespace
}  // namespace reprise
