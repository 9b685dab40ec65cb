#include "base/json_text.h"

#include <gtest/gtest.h>

namespace reprise {
namespace {

std::string nested(size_t depth) {
  return std::string(depth, '[') + std::string(depth, ']');
}

TEST(JsonText, LimitsNesting) {
  EXPECT_TRUE(parse_json(nested(64)).is_array());
  EXPECT_TRUE(parse_json(nested(65)).is_discarded());
  EXPECT_EQ(why_not_parsed(nested(65)), "values nested more than 64 deep");
  EXPECT_TRUE(parse_json(std::string(1'000'000, '[')).is_discarded());
  std::string objects;
  for (int i = 0; i < 100; ++i) objects += "{\"a\":";
  EXPECT_TRUE(parse_json(objects).is_discarded());
}

TEST(JsonText, BracketsInTextsDoNotCount) {
  const std::string text = "[\"" + std::string(500, '[') + "\\\"[\", 1]";
  ASSERT_TRUE(parse_json(text).is_array());
  EXPECT_EQ(parse_json(text).size(), 2u);
}

TEST(JsonText, LimitsTheNumberOfValues) {
  std::string text = "[0";
  for (int i = 1; i < 100; ++i) text += ",0";
  text += "]";
  EXPECT_EQ(why_not_parsed(text, {.values = 101}), "");
  EXPECT_EQ(why_not_parsed(text, {.values = 100}), "more than 100 values");
  std::string lists = "[";
  for (int i = 0; i < 100; ++i) lists += "[[]],";
  EXPECT_NE(why_not_parsed(lists, {.values = 200}), "");
}

TEST(JsonText, ShowsLongValuesShortened) {
  EXPECT_EQ(shown_json({{"a", 1}}), "{\"a\":1}");
  std::string umlauts;
  for (int i = 0; i < 200; ++i) umlauts += "ü";
  const std::string shown = shown_json(umlauts);
  EXPECT_LT(shown.size(), 120u);
  EXPECT_TRUE(shown.ends_with("ü…")) << shown;
}

}  // namespace
}  // namespace reprise
