#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace reprise::fuzz {

/// Makes inputs from a corpus. The same seed and number give the same input on every machine.
class Mutator {
 public:
  /// `with_header`: inputs are safetensors files, whose header is text after its length.
  Mutator(std::vector<std::string> corpus, uint64_t seed, bool with_header);

  /// Input `number`: first the corpus as it is, then mutations of it.
  std::string input(uint64_t number) const;

 private:
  std::vector<std::string> corpus_;
  uint64_t seed_;
  bool with_header_;
};

}  // namespace reprise::fuzz
