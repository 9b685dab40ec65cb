#include "data/tokens.h"

#include "base/input_file.h"
#include "base/text_check.h"
#include "data/dataset_error.h"
#include "data/documents.h"

#include <reprise/base/error.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <utility>
#include <vector>

namespace reprise::detail {
namespace {

/// A kind of file that llm.c's dev/data/data_common.py writes, with a header of 256 int32:
/// magic number, version, number of tokens.
struct LlmcFormat {
  int32_t magic;
  int32_t version;
  int64_t token_bytes;
};
// No headerless file starts with a magic number. As uint16 tokens the first would be 55448
// and 308, but GPT-2's end at 50256; as uint32 tokens both are larger than a vocabulary.
constexpr LlmcFormat kLlmcFormats[] = {{20240520, 1, 2}, {20240801, 7, 4}};
constexpr int64_t kLlmcHeaderBytes = 256 * 4;

/// Tokens of type `Token` in a file, from byte `begin` on. They are read when they are needed,
/// so that the file may be larger than memory.
template <typename Token>
class TokenFile {
 public:
  TokenFile(InputFile file, uint64_t begin)
      : file_(std::move(file)), begin_(begin) {}

  /// Reads the `count` tokens from `first` on. Throws c10::Error if the file has become shorter.
  void read(int64_t first, int64_t count, Token* out) const {
    try {
      file_.read(begin_ + static_cast<uint64_t>(first) * sizeof(Token), out,
                 static_cast<size_t>(count) * sizeof(Token));
    } catch (const Error& error) {
      dataset_error(file_.path(), without_origin(error.what()));
    }
  }

 private:
  InputFile file_;
  uint64_t begin_;
};

/// `length` tokens of type `Token`, starting at token `begin`, in samples of `seq`. The first
/// token of a sample is the last target of the previous one.
template <typename Token>
class TokenDataset : public Dataset {
 public:
  std::shared_ptr<const TokenFile<Token>> file;
  int64_t begin = 0;
  int64_t length = 0;
  int64_t seq = 0;
  std::string name;

  int64_t size() const override { return (length - 1) / seq; }
  int64_t count(int64_t /*index*/) const override { return seq; }

  Batch get(const std::vector<int64_t>& indices) const override {
    const auto count = static_cast<int64_t>(indices.size());
    Batch batch{.tensors = {torch::empty({count, seq}, torch::kLong),
                            torch::empty({count, seq}, torch::kLong)},
                .samples = count,
                .count = count * seq};
    int64_t* input = batch.tensors[0].template data_ptr<int64_t>();
    int64_t* target = batch.tensors[1].template data_ptr<int64_t>();
    std::vector<Token> read(static_cast<size_t>(seq) + 1);
    for (const int64_t index : indices) {
      TORCH_CHECK_INDEX(index >= 0 && index < size(),
                        "[dataset] expected a sample below ", size(), ", got ",
                        index);
      file->read(begin + index * seq, seq + 1, read.data());
      input = std::copy(read.begin(), read.end() - 1, input);
      target = std::copy(read.begin() + 1, read.end(), target);
    }
    return batch;
  }

  std::string fingerprint() const override { return sample_fingerprint(*this); }
  std::string description() const override {
    return fmt::format("{}, {} samples of {} {}", name, size(), seq,
                       sizeof(Token) == 1 ? "bytes" : "tokens");
  }
};

/// Throws if a token is not below the model's vocabulary.
template <typename Token>
void check_vocabulary(const TokenFile<Token>& file, int64_t total,
                      const DataOptions& options) {
  constexpr int64_t kBlock = 1 << 20;
  constexpr int64_t kPossible = int64_t{1} << (8 * sizeof(Token));
  if (options.vocab <= 0 || options.vocab >= kPossible) return;
  std::vector<Token> block(static_cast<size_t>(std::min(total, kBlock)));
  for (int64_t at = 0; at < total; at += kBlock) {
    const int64_t count = std::min(kBlock, total - at);
    file.read(at, count, block.data());
    const auto end = block.begin() + count;
    const auto most = std::max_element(block.begin(), end);
    if (*most < options.vocab) continue;
    dataset_error(
        options.name,
        fmt::format("expected tokens below the model's vocabulary of {}, found "
                    "{} at {}; choose a larger vocabulary",
                    options.vocab, *most, at + (most - block.begin())));
  }
}

template <typename Token>
std::shared_ptr<const Dataset> split(
    std::shared_ptr<const TokenFile<Token>> file, int64_t total,
    const DataOptions& options) {
  const std::string& path = options.name;
  check_vocabulary(*file, total, options);
  const bool test = options.split == Split::kTest;
  const auto test_length =
      static_cast<int64_t>(static_cast<double>(total) * options.test_fraction);
  const int64_t begin = test ? total - test_length : 0;
  const int64_t length = test ? test_length : total - test_length;
  const std::string name = std::filesystem::path(path).filename().string();
  if (options.documents != DocumentMode::kStream) {
    const auto read = [file = std::move(file), begin](
                          int64_t first, int64_t count, int64_t* out) {
      std::vector<Token> tokens(static_cast<size_t>(count));
      file->read(begin + first, count, tokens.data());
      std::copy(tokens.begin(), tokens.end(), out);
    };
    return make_documents({name, length, read}, options);
  }
  const auto data = std::make_shared<TokenDataset<Token>>();
  data->file = std::move(file);
  data->begin = begin;
  data->length = length;
  data->seq = options.seq;
  data->name = name;
  if (data->length < options.seq + 1) {
    dataset_error(
        path, fmt::format(
                  "expected at least {} tokens for one sample of {}, found {} "
                  "in the {} part of {}; use a longer file or a smaller seq",
                  options.seq + 1, options.seq, data->length,
                  test ? "test" : "training", total));
  }
  return data;
}

/// Position and width of the tokens in a binary file.
struct TokenLayout {
  int64_t begin = 0;  // in bytes
  int64_t token_bytes = 2;
};

/// Layout by the file's header, if there is one, and otherwise by its name.
TokenLayout layout_of(const InputFile& file, const std::string& path) {
  const auto size = static_cast<int64_t>(file.size());
  std::array<int32_t, 3> header{};
  if (size >= kLlmcHeaderBytes) file.read(0, header.data(), sizeof(header));
  for (const LlmcFormat& format : kLlmcFormats) {
    if (header[0] != format.magic) continue;
    if (header[1] != format.version) {
      dataset_error(
          path, fmt::format("expected version {} in llm.c's header, found {}",
                            format.version, header[1]));
    }
    const int64_t bytes = size - kLlmcHeaderBytes;
    if (bytes != int64_t{header[2]} * format.token_bytes) {
      dataset_error(path,
                    fmt::format("expected {} tokens of {} bytes as stated in "
                                "the header, found {} bytes",
                                header[2], format.token_bytes, bytes));
    }
    return {kLlmcHeaderBytes, format.token_bytes};
  }
  return {0, std::filesystem::path(path).extension() == ".bin" ? 2 : 4};
}

template <typename Token>
std::shared_ptr<const Dataset> open_binary(InputFile file, int64_t begin,
                                           const DataOptions& options) {
  constexpr int64_t kBytes = sizeof(Token);
  const auto size = static_cast<int64_t>(file.size());
  if (size % kBytes != 0) {
    dataset_error(
        options.name,
        fmt::format("expected tokens of {} bytes, found {} of {} "
                    "bytes",
                    kBytes, kBytes == 2 ? "an odd size" : "a size", size));
  }
  return split(std::make_shared<const TokenFile<Token>>(
                   std::move(file), static_cast<uint64_t>(begin)),
               (size - begin) / kBytes, options);
}

InputFile open_input(const std::string& path) {
  try {
    return InputFile(path);
  } catch (const Error& error) {
    dataset_error(path, without_origin(error.what()));
  }
}

}  // namespace

bool has_token_name(const std::string& path) {
  const auto extension = std::filesystem::path(path).extension();
  return extension == ".bin" || extension == ".bin32" || extension == ".u32";
}

std::shared_ptr<const Dataset> open_tokens(const DataOptions& options) {
  TORCH_CHECK(options.seq > 0, "[dataset] expected seq above 0, got ",
              options.seq);
  TORCH_CHECK(options.test_fraction >= 0 && options.test_fraction < 1,
              "[dataset] expected a test_fraction from 0 to below 1, got ",
              options.test_fraction);
  TORCH_CHECK((options.documents == DocumentMode::kStream) ==
                  (options.document_end < 0),
              "[dataset] expected a document_end token with padded or packed "
              "documents and only then, got ",
              options.document_end, " with ", to_text(options.documents));
  InputFile file = open_input(options.name);
  if (has_token_name(options.name)) {
    const TokenLayout layout = layout_of(file, options.name);
    return layout.token_bytes == 2
               ? open_binary<uint16_t>(std::move(file), layout.begin, options)
               : open_binary<uint32_t>(std::move(file), layout.begin, options);
  }
  return open_binary<uint8_t>(std::move(file), 0, options);
}

}  // namespace reprise::detail
