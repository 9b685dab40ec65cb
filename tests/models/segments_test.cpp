#include "models/segments.h"

#include "compat/autocast.h"
#include "small_models.h"
#include "support.h"

#include <reprise/recompute/strategy.h>

#include <cmath>
#include <map>
#include <set>

namespace reprise {
namespace {

using testing::device;
using testing::error_of;
using testing::on_device;
using testing::relative_error;
using testing::same;
using torch::Tensor;

constexpr int64_t kLength = 8;

/// Models of each kind, without dropout and with random norms and biases.
std::vector<Model> language_models(torch::ScalarType type) {
  std::vector<Model> models;
  const std::set<std::string> names = {"gpt2",         "llama-small",
                                       "llama-3.2-1b", "llama-3-8b",
                                       "qwen2.5-0.5b", "qwen2.5-7b"};
  for (const auto& small : testing::small_models()) {
    if (!names.contains(small.name)) continue;
    ModelOptions options = small.options;
    if (small.name == "gpt2") options.dropout = 0;
    torch::manual_seed(3);
    Model model = make_model(small.name, options);
    model.root->to(device(), type);
    const torch::NoGradGuard no_grad;
    for (Tensor parameter : model.root->parameters()) {
      parameter.add_(torch::randn_like(parameter), 0.1);
    }
    models.push_back(std::move(model));
  }
  return models;
}

struct Document {
  int64_t row, first, length;
};

/// Rows of documents; the rest is padding, whose tokens are arbitrary.
struct Packed {
  Packed(const Model& model, int64_t rows, std::vector<Document> list)
      : documents(std::move(list)) {
    torch::manual_seed(4);
    const auto integers = on_device(torch::kLong);
    tokens = torch::randint(model.options.vocab, {rows, kLength}, integers);
    targets = torch::full({rows, kLength}, -100, integers);
    segments = torch::zeros({rows, kLength}, integers);
    std::map<int64_t, int64_t> count;
    for (const auto& [row, first, length] : documents) {
      part(targets, row, first, length)
          .copy_(torch::randint(model.options.vocab, {1, length}, integers));
      part(segments, row, first, length).fill_(++count[row]);
    }
  }
  static Tensor part(const Tensor& t, int64_t row, int64_t first,
                     int64_t length) {
    return t.narrow(0, row, 1).narrow(1, first, length);
  }
  Tensors batch() const { return {tokens, targets, segments}; }

  std::vector<Document> documents;
  Tensor tokens, targets, segments;
};

/// Loss and gradients; frozen parameters have none.
std::vector<Tensor> run(const Model& model, const Tensors& batch,
                        const Schedule& schedule) {
  Execution execution(model.chain, schedule);
  const Tensor loss = execution.forward(batch).at(0);
  execution.backward({torch::ones_like(loss)});
  auto results = testing::take_gradients(model.root->parameters());
  results.push_back(loss.detach());
  return results;
}

Schedule none(const Model& model) {
  return make_schedule("none", model.chain.size());
}

/// The truth: each document as a row of its own, without segments.
std::vector<Tensor> one_by_one(const Model& model, const Packed& packed) {
  std::vector<Tensor> sums;
  for (const auto& [row, first, length] : packed.documents) {
    const auto of = [&, row = row, first = first,
                     length = length](const Tensor& t) {
      return Packed::part(t, row, first, length).contiguous();
    };
    const auto results =
        run(model, {of(packed.tokens), of(packed.targets)}, none(model));
    for (size_t i = 0; i < results.size(); ++i) {
      if (sums.size() <= i) {
        sums.push_back(results[i].clone());
      } else {
        sums[i] += results[i];
      }
    }
  }
  return sums;
}

void expect_close(const std::vector<Tensor>& expected,
                  const std::vector<Tensor>& results, const std::string& what) {
  ASSERT_EQ(expected.size(), results.size()) << what;
  for (size_t i = 0; i < results.size(); ++i) {
    EXPECT_TRUE(results[i].isfinite().all().item<bool>()) << what << " " << i;
    EXPECT_LT(relative_error(expected[i], results[i]), 1e-6)
        << what << " " << i;
  }
}

TEST(Segments, PackedRowsEqualDocumentsOneByOne) {
  for (const Model& model : language_models(torch::kDouble)) {
    const Packed packed(
        model, 3,
        {{0, 0, 5}, {0, 5, 3}, {1, 0, 2}, {1, 2, 3}, {1, 5, 1}, {2, 0, 8}});
    expect_close(one_by_one(model, packed),
                 run(model, packed.batch(), none(model)), model.name);
  }
}

TEST(Segments, PaddingChangesNothing) {
  for (const Model& model : language_models(torch::kDouble)) {
    // On the right, on the left, on both sides, and a row of nothing else.
    Packed packed(model, 4, {{0, 0, 5}, {1, 3, 5}, {2, 2, 2}, {2, 4, 3}});
    const auto expected = one_by_one(model, packed);
    expect_close(expected, run(model, packed.batch(), none(model)), model.name);
    packed.tokens.masked_fill_(packed.segments.eq(0), 0);
    expect_close(expected, run(model, packed.batch(), none(model)), model.name);
  }
}

TEST(Segments, OneSegmentPerRowEqualsNone) {
  for (const Model& model : language_models(torch::kDouble)) {
    const Packed packed(model, 2, {{0, 0, kLength}, {1, 0, kLength}});
    expect_close(run(model, {packed.tokens, packed.targets}, none(model)),
                 run(model, packed.batch(), none(model)), model.name);
  }
}

TEST(Segments, RecomputationIsExact) {
  for (const Model& model : language_models(torch::kFloat)) {
    const Packed packed(model, 2, {{0, 0, 3}, {0, 3, 5}, {1, 1, 6}});
    const auto kept = run(model, packed.batch(), none(model));
    std::vector<Schedule> schedules = {
        make_schedule("sqrt", model.chain.size()),
        make_schedule("all", model.chain.size())};
    for (const int variant : {1, 2}) {
      auto ops = make_schedule("all", model.chain.size()).ops();
      for (Op& op : ops) {
        const bool block = model.chain[op.stage].kind() == "block";
        if (op.kind == OpKind::kForwardKeep && block) op.variant = variant;
      }
      schedules.emplace_back("variants", model.chain.size(), ops);
    }
    for (const Schedule& schedule : schedules) {
      const auto again = run(model, packed.batch(), schedule);
      for (size_t i = 0; i < kept.size(); ++i) {
        EXPECT_TRUE(same(kept[i], again[i])) << model.name << " " << i;
      }
    }
  }
}

TEST(Segments, HalfPrecisionIsClose) {
  compat::AutocastState half;
  half.cpu_enabled = device().is_cpu();
  half.cuda_enabled = device().is_cuda();
  half.cpu_dtype = half.cuda_dtype = torch::kBFloat16;
  for (const Model& model : language_models(torch::kFloat)) {
    const Packed packed(model, 2, {{0, 0, 3}, {0, 3, 5}, {1, 1, 6}});
    const auto expected = run(model, packed.batch(), none(model));
    const compat::AutocastGuard autocast(half);
    const auto results = run(model, packed.batch(), none(model));
    EXPECT_LT(relative_error(expected.back(), results.back()), 0.02)
        << model.name;
  }
}

TEST(Segments, PositionsAndMaskFollowTheDefinition) {
  const Tensor segments = torch::tensor(
      {{1, 1, 2, 2, 2, 3, 0, 0}, {0, 0, 1, 1, 1, 1, 2, 0}}, torch::kLong);
  const Tensor positions = detail::segment_positions(segments);
  const Tensor mask = detail::segment_mask(segments, torch::kFloat);
  ASSERT_EQ(mask.sizes(), torch::IntArrayRef({2, 1, kLength, kLength}));
  for (int64_t n = 0; n < 2; ++n) {
    for (int64_t t = 0; t < kLength; ++t) {
      const auto of = [&](int64_t i) { return segments[n][i].item<int64_t>(); };
      int64_t first = t;
      while (first > 0 && of(first - 1) == of(t)) --first;
      EXPECT_EQ(positions[n][t].item<int64_t>(), t - first);
      for (int64_t s = 0; s < kLength; ++s) {
        const bool seen = s <= t && of(s) == of(t);
        EXPECT_EQ(mask[n][0][t][s].item<float>(), seen ? 0 : -INFINITY)
            << n << t << s;
      }
    }
  }
  const Tensor single = torch::ones({3, 1}, torch::kLong);
  EXPECT_TRUE(torch::equal(detail::segment_positions(single),
                           torch::zeros({3, 1}, torch::kLong)));
}

TEST(Segments, ErrorsNameTheShapes) {
  const Model model = language_models(torch::kFloat).front();
  const Packed packed(model, 2, {{0, 0, 3}});
  const auto error = [&](const Tensors& batch) {
    return error_of([&] { run(model, batch, none(model)); });
  };
  std::string text =
      error({packed.tokens, packed.targets, packed.segments.narrow(1, 0, 4)});
  EXPECT_NE(text.find("expected segments of type int64"), std::string::npos)
      << text;
  text =
      error({packed.tokens, packed.targets, packed.segments.to(torch::kInt)});
  EXPECT_NE(text.find("expected segments of type int64"), std::string::npos)
      << text;
  text = error({packed.tokens, packed.targets, packed.segments, packed.tokens});
  EXPECT_NE(text.find("got 4 tensors"), std::string::npos) << text;
}

}  // namespace
}  // namespace reprise
