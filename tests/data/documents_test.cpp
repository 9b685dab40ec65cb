#include "files.h"
#include "support.h"

#include <reprise/data/dataset.h>

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace {

using namespace reprise::testing;
using reprise::Batch;
using reprise::DataOptions;
using reprise::DocumentMode;
using reprise::open_dataset;
using reprise::Split;

DataOptions documents_of(const std::string& path, DocumentMode mode,
                         int64_t seq) {
  return {.name = path,
          .tokens = true,
          .seq = seq,
          .vocab = 256,
          .test_fraction = 0,
          .documents = mode,
          .document_end = '.'};
}

TEST(Documents, PadsOnePerRow) {
  const Folder folder;
  write_bytes(folder / "a.txt", "ab.cdefg..hi");  // "." alone has no target
  const auto data =
      open_dataset(documents_of(folder / "a.txt", DocumentMode::kPadded, 4));
  // "cdefg." is longer than a row: its second piece is "g.".
  ASSERT_EQ(data->size(), 4);
  const Batch batch = data->get({0, 1, 2, 3});
  EXPECT_TRUE(same(batch.tensors[0], torch::tensor({{'a', 'b', '.', '\0'},
                                                    {'c', 'd', 'e', 'f'},
                                                    {'g', '.', '\0', '\0'},
                                                    {'h', 'i', '\0', '\0'}},
                                                   torch::kLong)));
  const int64_t no = -100;
  EXPECT_TRUE(same(batch.tensors[1],
                   torch::tensor(std::vector<int64_t>{'b', '.', no, no,  //
                                                      'd', 'e', 'f', 'g', '.',
                                                      no, no, no,  //
                                                      'i', no, no, no})
                       .view({4, 4})));
  EXPECT_TRUE(same(batch.tensors[2],
                   torch::tensor(std::vector<int64_t>{1, 1, 1, 0, 1, 1, 1, 1, 1,
                                                      1, 0, 0, 1, 1, 0, 0})
                       .view({4, 4})));
  EXPECT_EQ(batch.samples, 4);
  EXPECT_EQ(batch.count, 2 + 4 + 1 + 1);
  EXPECT_EQ(data->count(1), 4);
  EXPECT_EQ(data->description(),
            "a.txt, 4 samples of 4 tokens, padded documents");
}

TEST(Documents, PacksWholeOnesIntoRows) {
  const Folder folder;
  write_bytes(folder / "a.txt", "ab.cdef.g.");
  const auto data =
      open_dataset(documents_of(folder / "a.txt", DocumentMode::kPacked, 6));
  ASSERT_EQ(data->size(), 2);
  const Batch batch = data->get({0, 1});
  // The short third document fits behind the first.
  EXPECT_TRUE(
      same(batch.tensors[0], torch::tensor({{'a', 'b', '.', 'g', '.', '\0'},
                                            {'c', 'd', 'e', 'f', '.', '\0'}},
                                           torch::kLong)));
  EXPECT_TRUE(same(
      batch.tensors[2],
      torch::tensor({{1, 1, 1, 2, 2, 0}, {1, 1, 1, 1, 1, 0}}, torch::kLong)));
  EXPECT_EQ(batch.count, 2 + 1 + 4);
}

/// By brute force: every pair of neighbours in a document is predicted exactly once.
TEST(Documents, PredictsEveryTokenOfEveryDocumentOnce) {
  const Folder folder;
  std::mt19937 random(3);
  std::string text;
  for (int i = 0; i < 400; ++i) {
    const int length = static_cast<int>(random() % 30);
    for (int k = 0; k < length; ++k) {
      text += static_cast<char>('a' + random() % 26);
    }
    text += '.';
  }
  std::map<std::pair<int64_t, int64_t>, int64_t> expected;
  for (size_t i = 0; i + 1 < text.size(); ++i) {
    if (text[i] != '.') ++expected[{text[i], text[i + 1]}];
  }
  write_bytes(folder / "a.txt", text);
  int64_t rows = 0;
  for (const auto mode : {DocumentMode::kPadded, DocumentMode::kPacked}) {
    const auto data = open_dataset(documents_of(folder / "a.txt", mode, 16));
    std::map<std::pair<int64_t, int64_t>, int64_t> found;
    for (int64_t i = 0; i < data->size(); ++i) {
      const Batch batch = data->get({i});
      const auto* token = batch.tensors[0].data_ptr<int64_t>();
      const auto* target = batch.tensors[1].data_ptr<int64_t>();
      const auto* segment = batch.tensors[2].data_ptr<int64_t>();
      int64_t count = 0;
      for (int64_t t = 0; t < 16; ++t) {
        if (t > 0 && segment[t] != segment[t - 1]) {
          // Documents are numbered from left to right; padding is at the end.
          EXPECT_TRUE(segment[t] == 0 || segment[t] == segment[t - 1] + 1);
        }
        if (target[t] == -100) continue;
        EXPECT_GT(segment[t], 0);
        if (t < 15 && segment[t + 1] == segment[t]) {
          EXPECT_EQ(target[t], token[t + 1]);
        }
        ++found[{token[t], target[t]}];
        ++count;
      }
      EXPECT_EQ(batch.count, count);
      EXPECT_EQ(data->count(i), count);
    }
    EXPECT_EQ(found, expected) << to_text(mode);
    if (mode == DocumentMode::kPadded) {
      rows = data->size();
    } else {
      EXPECT_LT(data->size(), rows);
      // Little is left empty.
      EXPECT_LT(16 * data->size(),
                static_cast<int64_t>(1.1 * static_cast<double>(text.size())));
    }
  }
}

TEST(Documents, ErrorsSayWhatToDo) {
  const Folder folder;
  write_bytes(folder / "a.txt", "....");
  auto options = documents_of(folder / "a.txt", DocumentMode::kPadded, 4);
  auto text = error_of_opening(options);
  EXPECT_NE(text.find("documents of at least two tokens, found none in 4"),
            std::string::npos)
      << text;
  options.document_end = ',';
  text = error_of_opening(options);
  EXPECT_NE(text.find("end with the token 44, which does not occur in 4"),
            std::string::npos)
      << text;
  options.document_end = -1;
  text = error_of_opening(options);
  EXPECT_NE(text.find("expected a document_end token with padded or packed"),
            std::string::npos)
      << text;
  options.documents = DocumentMode::kStream;
  options.document_end = '.';
  text = error_of_opening(options);
  EXPECT_NE(text.find("and only then, got 46 with stream"), std::string::npos)
      << text;
}

}  // namespace
