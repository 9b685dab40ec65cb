#include "base/nearest.h"

#include <algorithm>
#include <cctype>
#include <numeric>

namespace reprise {
namespace {

/// Lower case, with dashes instead of underscores.
std::string folded(std::string_view text) {
  std::string result(text);
  for (char& c : result) {
    c = c == '_'
            ? '-'
            : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return result;
}

/// Optimal string alignment distance: Levenshtein's with swaps of adjacent letters.
size_t edits(const std::string& a, const std::string& b) {
  std::vector<size_t> before, last, row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    before = std::move(last);
    last = row;
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replace = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, replace});
      const bool swapped =
          i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row[b.size()];
}

}  // namespace

std::string nearest(std::string_view word,
                    const std::vector<std::string>& names) {
  constexpr size_t kShortestPrefix = 3;
  constexpr size_t kLongestWord = 100;  // longer ones are no names
  if (word.size() > kLongestWord) return "";
  const std::string given = folded(word);
  std::string best;
  size_t least = 2 * (word.size() / 2 + 1);
  for (const std::string& name : names) {
    const std::string known = folded(name);
    size_t cost = 2 * edits(given, known);
    if (known.starts_with(given) && cost > 0) {
      // Half an edit closer than a name that does not begin with it. If the word is
      // long enough, the rest of the name does not count.
      cost = given.size() >= kShortestPrefix ? 1 : cost - 1;
    }
    if (cost < least) {
      least = cost;
      best = name;
    }
  }
  return best;
}

std::string did_you_mean(std::string_view word,
                         const std::vector<std::string>& names) {
  const std::string near = nearest(word, names);
  return near.empty() ? "" : "; did you mean " + near + "?";
}

}  // namespace reprise
