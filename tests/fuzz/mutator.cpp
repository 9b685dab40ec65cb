#include "mutator.h"

#include "base/splitmix.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstring>
#include <utility>

namespace reprise::fuzz {
namespace {

constexpr size_t kMostBytes = 1 << 16;
constexpr size_t kHeaderLength = 8;

constexpr std::array kNumbers = {"0",
                                 "-1",
                                 "1",
                                 "2147483647",
                                 "2147483648",
                                 "4294967295",
                                 "4294967296",
                                 "-2147483649",
                                 "1e308",
                                 "1e400",
                                 "-1e308",
                                 "nan",
                                 "inf",
                                 "0.5",
                                 "1e-320",
                                 "0x10",
                                 "00",
                                 "1e5",
                                 "1000000",
                                 "65536",
                                 "9223372036854775807",
                                 "9223372036854775808",
                                 "-9223372036854775808",
                                 "18446744073709551615",
                                 "18446744073709551616",
                                 "4611686018427387904",
                                 "99999999999999999999999999",
                                 "-0",
                                 "1.5",
                                 "2000000000"};

constexpr std::array kTokens = {"null",
                                "true",
                                "false",
                                "[]",
                                "{}",
                                "\"\"",
                                "[",
                                "]",
                                "{",
                                "}",
                                ":",
                                ",",
                                "\"",
                                "\\",
                                "\n",
                                " ",
                                "\t",
                                "- ",
                                "? ",
                                "&a ",
                                "*a",
                                "<<: ",
                                "!!binary ",
                                "--- ",
                                "# ",
                                "|\n",
                                "\\u0000",
                                "\\ud800",
                                "__metadata__",
                                "F32",
                                "BF16",
                                "\xff",
                                "\xc0\x80",
                                "\xed\xa0\x80",
                                "/",
                                "..",
                                "../",
                                "%s%n",
                                "K0 ",
                                "B0 ",
                                "X0 ",
                                "D1.1 ",
                                "GiB",
                                "MB",
                                "every:",
                                "'",
                                "=",
                                "--",
                                "\r\n"};

/// A sequence of random numbers.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  /// A number below `limit`, which is above 0.
  size_t below(size_t limit) {
    state_ = detail::splitmix(state_);
    return static_cast<size_t>(state_ % limit);
  }
  template <class List>
  const auto& one_of(const List& list) {
    return list[below(list.size())];
  }
  bool chance(size_t of) { return below(of) == 0; }

 private:
  uint64_t state_;
};

/// A range of `text`, most often a short one.
std::pair<size_t, size_t> range_of(const std::string& text, Random& random) {
  if (text.empty()) return {0, 0};
  const size_t from = random.below(text.size());
  const size_t most = text.size() - from;
  const size_t count = random.chance(3)
                           ? random.below(most + 1)
                           : random.below(std::min<size_t>(most, 16) + 1);
  return {from, count};
}

size_t place_in(const std::string& text, Random& random) {
  return random.below(text.size() + 1);
}

void change_bytes(std::string& text, Random& random) {
  if (text.empty()) return;
  const size_t at = random.below(text.size());
  if (random.chance(2)) {
    text[at] = static_cast<char>(text[at] ^ (1 << random.below(8)));
  } else {
    text[at] = static_cast<char>(random.below(256));
  }
}

void change_integer(std::string& text, Random& random) {
  static constexpr std::array<uint64_t, 12> values = {0,
                                                      1,
                                                      0x7f,
                                                      0xff,
                                                      0x7fff,
                                                      0xffff,
                                                      0x7fffffff,
                                                      0x80000000u,
                                                      0xffffffffu,
                                                      0x7fffffffffffffffu,
                                                      0x8000000000000000u,
                                                      0xffffffffffffffffu};
  const size_t bytes = size_t{1} << random.below(4);
  if (text.size() < bytes) return;
  const size_t at = random.below(text.size() - bytes + 1);
  const uint64_t value = random.one_of(values) + random.below(3) - 1;
  const bool big_endian = random.chance(2);
  for (size_t i = 0; i < bytes; ++i) {
    const size_t shift = 8 * (big_endian ? bytes - 1 - i : i);
    text[at + i] = static_cast<char>(value >> shift);
  }
}

/// Replaces a number in the text by one at the limit of a type.
void change_number(std::string& text, Random& random) {
  std::vector<std::pair<size_t, size_t>> found;
  for (size_t i = 0; i < text.size(); ++i) {
    if (std::isdigit(static_cast<unsigned char>(text[i])) == 0) continue;
    size_t end = i;
    while (end < text.size() &&
           (std::isalnum(static_cast<unsigned char>(text[end])) != 0 ||
            text[end] == '.')) {
      ++end;
    }
    found.emplace_back(i, end - i);
    i = end;
  }
  if (found.empty()) {
    text.insert(place_in(text, random), random.one_of(kNumbers));
    return;
  }
  const auto [at, count] = random.one_of(found);
  text.replace(at, count, random.one_of(kNumbers));
}

/// Replaces a quoted text, or what is between separators, by something of another type.
void change_value(std::string& text, Random& random) {
  const size_t from = text.find_first_of("\":,[ ", place_in(text, random));
  if (from == std::string::npos) return;
  const size_t end = text.find_first_of("\",]} \n", from + 1);
  const size_t last = end == std::string::npos ? text.size() : end;
  text.replace(
      from + 1, last - from - 1,
      random.chance(3) ? random.one_of(kNumbers) : random.one_of(kTokens));
}

void nest(std::string& text, Random& random) {
  static constexpr std::array opening = {
      "[", "{\"a\":", "{a: ", "- ", "(", "[{\"a\":"};
  static constexpr std::array closing = {"]", "}", "}", "\n", ")", "}]"};
  const size_t kind = random.below(opening.size());
  const size_t count = random.chance(20)  ? 20'000
                       : random.chance(4) ? 1 + random.below(300)
                                          : 1 + random.below(8);
  std::string open, close;
  for (size_t i = 0; i < count; ++i) {
    open += opening[kind];
    close += closing[kind];
  }
  const auto [from, length] = range_of(text, random);
  if (random.chance(2)) text.insert(from + length, close);
  text.insert(from, open);
}

void move_range(std::string& text, Random& random) {
  const auto [from, count] = range_of(text, random);
  const std::string part = text.substr(from, count);
  switch (random.below(4)) {
    case 0:
      text.erase(from, count);
      break;
    case 1:
      text.insert(place_in(text, random), part);
      break;
    case 2:
      text.erase(from, count);
      text.insert(place_in(text, random), part);
      break;
    default: {
      const size_t times = 1 + random.below(random.chance(8) ? 2000 : 8);
      std::string copies;
      for (size_t i = 0; i < times && copies.size() < kMostBytes; ++i) {
        copies += part;
      }
      text.insert(from, copies);
    }
  }
}

void mutate(std::string& text, const std::vector<std::string>& corpus,
            Random& random) {
  switch (random.below(10)) {
    case 0:
    case 1:
      return change_bytes(text, random);
    case 2:
      return change_integer(text, random);
    case 3:
    case 4:
      return change_number(text, random);
    case 5:
      return change_value(text, random);
    case 6:
      return random.chance(4) ? nest(text, random)
                              : void(text.insert(place_in(text, random),
                                                 random.one_of(kTokens)));
    case 7:
    case 8:
      return move_range(text, random);
    default:
      break;
  }
  if (random.chance(2)) {
    text.resize(place_in(text, random));
  } else {
    const std::string& other = random.one_of(corpus);
    const auto [from, count] = range_of(other, random);
    text.insert(place_in(text, random), other.substr(from, count));
  }
}

}  // namespace

Mutator::Mutator(std::vector<std::string> corpus, uint64_t seed,
                 bool with_header)
    : corpus_(std::move(corpus)), seed_(seed), with_header_(with_header) {
  if (corpus_.empty()) corpus_.emplace_back();
}

std::string Mutator::input(uint64_t number) const {
  if (number < corpus_.size()) return corpus_[number];
  Random random(detail::splitmix(seed_, number));
  std::string text = random.one_of(corpus_);
  // Mutate the header as text, and correct its length, most of the time.
  std::string data;
  uint64_t length = 0;
  const bool header =
      with_header_ && text.size() > kHeaderLength && !random.chance(5);
  if (header) {
    std::memcpy(&length, text.data(), kHeaderLength);
    length = std::min<uint64_t>(length, text.size() - kHeaderLength);
    data = text.substr(kHeaderLength + length);
    text = text.substr(kHeaderLength, length);
  }
  const size_t times = 1 + random.below(random.chance(2) ? 2 : 10);
  for (size_t i = 0; i < times; ++i) {
    mutate(text, corpus_, random);
    if (text.size() > kMostBytes) text.resize(kMostBytes);
  }
  if (!header) return text;
  length = text.size();
  std::string file(kHeaderLength, '\0');
  std::memcpy(file.data(), &length, kHeaderLength);
  return file + text + data;
}

}  // namespace reprise::fuzz
