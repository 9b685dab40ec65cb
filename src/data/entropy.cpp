#include <reprise/data/entropy.h>
#include <reprise/data/file.h>

#include <c10/util/Exception.h>

#include <array>
#include <cmath>
#include <cstdint>

namespace reprise {

double unigram_entropy_of_text(const std::string& path) {
  const std::string text = read_text(path);
  TORCH_CHECK(!text.empty(), "[entropy] expected text, ", path, " is empty");
  std::array<int64_t, 256> seen{};
  for (const char c : text) ++seen[static_cast<unsigned char>(c)];
  double entropy = 0;
  for (const int64_t count : seen) {
    if (count == 0) continue;
    const double share =
        static_cast<double>(count) / static_cast<double>(text.size());
    entropy -= share * std::log(share);
  }
  return entropy;
}

}  // namespace reprise
