#include "support.h"

#include <reprise/base/bytes.h>
#include <reprise/base/error.h>

namespace reprise {
namespace {

TEST(Bytes, Format) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1.00 KiB");
  EXPECT_EQ(format_bytes(-1536), "-1.50 KiB");
  EXPECT_EQ(format_bytes(int64_t{640} << 20), "640 MiB");
  EXPECT_EQ(format_bytes((int64_t{1} << 30) - 1), "1.00 GiB");
  EXPECT_EQ(format_bytes(int64_t{80} << 30), "80.0 GiB");
}

TEST(Bytes, Parse) {
  EXPECT_EQ(parse_bytes("4096"), 4096);
  EXPECT_EQ(parse_bytes("8GiB"), int64_t{8} << 30);
  EXPECT_EQ(parse_bytes("8 gib"), int64_t{8} << 30);
  EXPECT_EQ(parse_bytes("2TB"), 2'000'000'000'000);
  EXPECT_EQ(parse_bytes("8000MB"), 8000000000);
  EXPECT_EQ(parse_bytes("1.5kib"), 1536);
}

/// 8G may mean powers of 1024 or of 1000, which differ by 7 %.
TEST(Bytes, ParseRejectsAmbiguousUnits) {
  for (const char* text : {"8G", "8 g", "1.5m", "10K", "2T"}) {
    const std::string error = testing::error_of([&] { parse_bytes(text); });
    EXPECT_NE(error.find("iB (powers of 1024) or "), std::string::npos)
        << error;
    EXPECT_NE(error.find("B (powers of 1000)"), std::string::npos) << error;
  }
  EXPECT_NE(
      testing::error_of([] { parse_bytes("8 G"); })
          .find("expected 8GiB (powers of 1024) or 8GB (powers of 1000), got "
                "'8 G'"),
      std::string::npos);
}

TEST(Bytes, ParseRejectsOtherText) {
  for (const char* text :
       {"", "GiB", "-1GiB", "8 gallons", "-8G", "nan", "1e300TB"}) {
    EXPECT_THROW(parse_bytes(text), Error) << text;
    EXPECT_NE(testing::error_of([&] {
                parse_bytes(text);
              }).find("expected a size such as 8GiB"),
              std::string::npos)
        << text;
  }
}

}  // namespace
}  // namespace reprise
