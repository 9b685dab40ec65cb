#include "support.h"

#include <reprise/base/enum_text.h>

namespace reprise {

enum class Colour { kRed, kGreen, kBlue };

template <>
struct EnumText<Colour> {
  static constexpr std::array<std::string_view, 3> names{"red", "green",
                                                         "blue"};
};

namespace {

using testing::error_of;

TEST(EnumText, ConvertsBothWays) {
  for (const auto colour : {Colour::kRed, Colour::kGreen, Colour::kBlue}) {
    EXPECT_EQ(from_text<Colour>(to_text(colour)), colour);
  }
  EXPECT_EQ(to_text(Colour::kGreen), "green");
  EXPECT_EQ(names_of<Colour>(),
            (std::vector<std::string>{"red", "green", "blue"}));
}

TEST(EnumText, FindsNamesThatExist) {
  EXPECT_EQ(try_from_text<Colour>("blue"), Colour::kBlue);
  for (const char* text : {"", "Blue", "blu", "blues"}) {
    EXPECT_FALSE(try_from_text<Colour>(text)) << text;
  }
}

TEST(EnumText, SuggestsTheNearestName) {
  EXPECT_NE(error_of([] { from_text<Colour>("gren"); })
                .find("expected one of red, green, blue, got 'gren'; did you "
                      "mean green?"),
            std::string::npos);
}

}  // namespace
}  // namespace reprise
