#include "base/nearest.h"

#include "support.h"

namespace reprise {
namespace {

const std::vector<std::string> kKnownNames = {
    "mlp", "cnn-basic", "resnet18", "gpt2", "gpt2-xl", "channels-last", "sgd"};

TEST(Nearest, FindsTheClosestName) {
  EXPECT_EQ(nearest("mpl", kKnownNames), "mlp");  // one swap
  EXPECT_EQ(nearest("gtp2", kKnownNames), "gpt2");
  EXPECT_EQ(nearest("cnn_basic", kKnownNames), "cnn-basic");
  EXPECT_EQ(nearest("SGD", kKnownNames), "sgd");
  EXPECT_EQ(nearest("resnet", kKnownNames), "resnet18");  // a prefix
  EXPECT_EQ(nearest("channel", kKnownNames), "channels-last");
  EXPECT_EQ(nearest("gpt2", kKnownNames), "gpt2");
  EXPECT_EQ(nearest("gpt2-xxl", kKnownNames), "gpt2-xl");
}

TEST(Nearest, PrefersANameThatBeginsWithTheWord) {
  EXPECT_EQ(nearest("of", {"auto", "on", "off"}), "off");
  EXPECT_EQ(nearest("bert", {"best", "bert-base"}), "bert-base");
}

TEST(Nearest, IsEmptyIfNothingIsClose) {
  EXPECT_EQ(nearest("transformer", kKnownNames), "");
  EXPECT_EQ(nearest("", kKnownNames), "");
  EXPECT_EQ(nearest("xy", kKnownNames), "");
  EXPECT_EQ(nearest("mlp", {}), "");
  EXPECT_EQ(did_you_mean("transformer", kKnownNames), "");
  EXPECT_EQ(did_you_mean("mpl", kKnownNames), "; did you mean mlp?");
}

}  // namespace
}  // namespace reprise
