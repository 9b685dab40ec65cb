#include "data/documents.h"

#include "data/dataset_error.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

namespace reprise::detail {
namespace {

constexpr int64_t kNoTarget = -100;  // target without a loss

/// A document, or a part of one that is longer than a row.
struct Piece {
  int64_t first = 0;     // token
  int64_t length = 0;    // tokens
  bool complete = true;  // whether its last token is the last of the document
  int64_t targets() const { return length - (complete ? 1 : 0); }
};

void add_document(std::vector<Piece>& pieces, int64_t first, int64_t length,
                  int64_t seq) {
  while (length > 0) {
    const int64_t some = std::min(length, seq);
    const Piece piece{first, some, some == length};
    if (piece.targets() > 0) pieces.push_back(piece);
    first += some;
    length -= some;
  }
}

struct Found {
  std::vector<Piece> pieces;
  int64_t ends = 0;  // end tokens
};

Found find_pieces(const TokenRange& tokens, int64_t end, int64_t seq) {
  constexpr int64_t kBlock = 1 << 16;
  std::vector<int64_t> block(kBlock);
  Found found;
  int64_t first = 0;
  for (int64_t at = 0; at < tokens.length; at += kBlock) {
    const int64_t count = std::min(kBlock, tokens.length - at);
    tokens.read(at, count, block.data());
    for (int64_t i = 0; i < count; ++i) {
      if (block[static_cast<size_t>(i)] != end) continue;
      add_document(found.pieces, first, at + i + 1 - first, seq);
      first = at + i + 1;
      ++found.ends;
    }
  }
  add_document(found.pieces, first, tokens.length - first, seq);
  return found;
}

/// Puts each piece into the first of the latest rows that has room for it.
std::vector<std::vector<Piece>> pack_rows(const std::vector<Piece>& pieces,
                                          int64_t seq) {
  constexpr size_t kOpenRows = 32;
  struct Open {
    size_t row;
    int64_t room;
  };
  std::vector<std::vector<Piece>> rows;
  std::deque<Open> open;
  for (const Piece& piece : pieces) {
    auto found = std::find_if(open.begin(), open.end(), [&](const Open& row) {
      return row.room >= piece.length;
    });
    if (found == open.end()) {
      if (open.size() == kOpenRows) open.pop_front();
      rows.emplace_back();
      found = open.insert(open.end(), Open{rows.size() - 1, seq});
    }
    rows[found->row].push_back(piece);
    found->room -= piece.length;
  }
  return rows;
}

class Documents final : public Dataset {
 public:
  Documents(TokenRange tokens, std::vector<std::vector<Piece>> rows,
            int64_t seq, DocumentMode mode)
      : tokens_(std::move(tokens)),
        rows_(std::move(rows)),
        seq_(seq),
        mode_(mode) {}

  int64_t size() const override { return static_cast<int64_t>(rows_.size()); }

  int64_t count(int64_t index) const override {
    int64_t count = 0;
    for (const Piece& piece : row(index)) count += piece.targets();
    return count;
  }

  Batch get(const std::vector<int64_t>& indices) const override {
    const auto samples = static_cast<int64_t>(indices.size());
    Batch batch{
        .tensors = {torch::zeros({samples, seq_}, torch::kLong),
                    torch::full({samples, seq_}, kNoTarget, torch::kLong),
                    torch::zeros({samples, seq_}, torch::kLong)},
        .samples = samples};
    std::vector<int64_t> read(static_cast<size_t>(seq_) + 1);
    for (int64_t n = 0; n < samples; ++n) {
      int64_t at = n * seq_;
      int64_t segment = 0;
      for (const Piece& piece : row(indices[static_cast<size_t>(n)])) {
        const int64_t targets = piece.targets();
        tokens_.read(piece.first, targets + 1, read.data());
        std::copy_n(read.begin(), piece.length, data(batch, 0) + at);
        std::copy_n(read.begin() + 1, targets, data(batch, 1) + at);
        std::fill_n(data(batch, 2) + at, piece.length, ++segment);
        at += piece.length;
        batch.count += targets;
      }
    }
    return batch;
  }

  std::string fingerprint() const override { return sample_fingerprint(*this); }
  std::string description() const override {
    return fmt::format("{}, {} samples of {} tokens, {} documents",
                       tokens_.name, size(), seq_, to_text(mode_));
  }

 private:
  const std::vector<Piece>& row(int64_t index) const {
    TORCH_CHECK_INDEX(index >= 0 && index < size(),
                      "[dataset] expected a sample below ", size(), ", got ",
                      index);
    return rows_[static_cast<size_t>(index)];
  }
  static int64_t* data(const Batch& batch, size_t i) {
    return batch.tensors[i].data_ptr<int64_t>();
  }

  TokenRange tokens_;
  std::vector<std::vector<Piece>> rows_;
  int64_t seq_;
  DocumentMode mode_;
};

}  // namespace

std::shared_ptr<const Dataset> make_documents(TokenRange tokens,
                                              const DataOptions& options) {
  const auto [pieces, ends] =
      find_pieces(tokens, options.document_end, options.seq);
  if (ends == 0 && options.split == Split::kTrain) {
    dataset_error(options.name,
                  fmt::format("expected documents that end with the token {}, "
                              "which does not occur in {} tokens",
                              options.document_end, tokens.length));
  }
  if (pieces.empty()) {
    dataset_error(options.name,
                  fmt::format("expected documents of at least two tokens, "
                              "found none in {} tokens",
                              tokens.length));
  }
  std::vector<std::vector<Piece>> rows;
  if (options.documents == DocumentMode::kPacked) {
    rows = pack_rows(pieces, options.seq);
  } else {
    for (const Piece& piece : pieces) rows.push_back({piece});
  }
  return std::make_shared<Documents>(std::move(tokens), std::move(rows),
                                     options.seq, options.documents);
}

}  // namespace reprise::detail
