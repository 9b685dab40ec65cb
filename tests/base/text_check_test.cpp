#include "base/text_check.h"

#include "support.h"

#include <limits>

namespace reprise {
namespace {

TEST(TextCheck, WholeNumbers) {
  const TextCheck check = whole_number(1, 300);
  for (const char* text : {"1", "300", "42"}) EXPECT_EQ(check(text), "");
  // 010 is 8 to some readers, 0x10 is 16.
  for (const char* text :
       {"0", "301", "-1", "", "abc", "1.5", "1e2", " 1", "1 ", "+1", "010",
        "0x10", "99999999999999999999", "-99999999999999999999"}) {
    EXPECT_EQ(check(text), "expected a whole number from 1 to 300, got '" +
                               std::string(text) + "'");
  }
  const TextCheck seed = whole_number(0, std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(seed("18446744073709551615"), "");
  EXPECT_NE(seed("18446744073709551616"), "");
  EXPECT_EQ(seed("0"), "");
  const TextCheck negative = whole_number(-5, 5);
  EXPECT_EQ(negative("-5"), "");
  EXPECT_NE(negative("-6"), "");
}

TEST(TextCheck, LongValuesAreCut) {
  EXPECT_LT(whole_number(1, 2)(std::string(5000, '9')).size(), 150u);
}

TEST(TextCheck, RealNumbers) {
  EXPECT_EQ(real_number(0, 1)("1"), "");
  EXPECT_EQ(real_number(0, 1)("1e-3"), "");
  EXPECT_EQ(real_number(0, 1, Ends::kLow)("0"), "");
  EXPECT_EQ(real_number(0, 1, Ends::kLow)("1"),
            "expected a number from 0 to below 1, got '1'");
  EXPECT_EQ(real_number(0, 1, Ends::kNone)("0"),
            "expected a number above 0 to below 1, got '0'");
  for (const char* text : {"", "nan", "inf", "-inf", "x", "0.5x", " 0.5"}) {
    EXPECT_NE(real_number(-10, 10)(text), "") << text;
  }
}

TEST(TextCheck, Words) {
  const TextCheck few = one_of({"table", "json"});
  EXPECT_EQ(few("json"), "");
  EXPECT_EQ(few("jsno"),
            "expected one of table, json, got 'jsno'; did you mean json?");
  EXPECT_EQ(few("xml"), "expected one of table, json, got 'xml'");
  EXPECT_EQ(one_of({"optimizer"})("x"), "expected optimizer, got 'x'");
}

TEST(TextCheck, Sizes) {
  EXPECT_EQ(byte_size(1024)("1KiB"), "");
  EXPECT_NE(byte_size(1024)("25").find("which is 25 bytes; name a unit"),
            std::string::npos);
  EXPECT_NE(byte_size(1)("8G").find("8GiB"), std::string::npos);
  EXPECT_NE(byte_size(1)(""), "");
}

TEST(TextCheck, PlainNames) {
  for (const char* good : {"a", "llama-3.2-1b", "My_Model.2"}) {
    EXPECT_TRUE(is_plain_name(good)) << good;
  }
  for (const char* bad : {"", "-a", "a b", "a/b", "é", "a\n"}) {
    EXPECT_FALSE(is_plain_name(bad)) << bad;
  }
}

TEST(TextCheck, KnowsUtf8) {
  for (const char* good : {"", "abc", "Größe", "日本", "😀", "\u0080"}) {
    EXPECT_TRUE(is_utf8(good)) << good;
  }
  for (const char* bad :
       {"\xff", "a\x80", "\xc3", "\xc0\x80", "\xe0\x80\x80", "\xed\xa0\x80",
        "\xf4\x90\x80\x80", "\xf8\x88\x80\x80\x80", "\xe2\x82"}) {
    EXPECT_FALSE(is_utf8(bad)) << bad;
  }
}

TEST(TextCheck, QuotesAreCutBetweenCharacters) {
  std::string text;
  for (int i = 0; i < 60; ++i) text += "ü";
  EXPECT_TRUE(is_utf8(in_quotes(text)));
  EXPECT_TRUE(is_utf8(in_quotes("x" + text)));
  EXPECT_LT(in_quotes(text).size(), 70u);
}

TEST(TextCheck, MessagesWithoutOriginKeepFlags) {
  EXPECT_EQ(without_origin("[parse] expected x"), "expected x");
  EXPECT_EQ(without_origin("[--batch] expected x"), "--batch: expected x");
  EXPECT_EQ(without_origin("expected [x] y"), "expected [x] y");
}

}  // namespace
}  // namespace reprise
