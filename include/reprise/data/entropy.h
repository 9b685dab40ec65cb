#pragma once

#include <string>

namespace reprise {

/// Entropy of the file's bytes taken one by one, in nats a byte: the loss of the
/// best model that ignores context. A language model that has learnt anything of
/// the order is below it. Throws c10::Error where the file cannot be read or is
/// empty.
double unigram_entropy_of_text(const std::string& path);

}  // namespace reprise
