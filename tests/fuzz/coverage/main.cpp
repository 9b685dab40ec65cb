// A target of libFuzzer, which changes inputs so that they reach new code. The environment
// variable FUZZ_FORMAT chooses the format; see run.sh.
#include "target.h"

#include <reprise/base/error.h>
#include <reprise/study/study_file.h>

#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <utility>
#include <vector>

namespace reprise::fuzz {
namespace {

constexpr size_t kMostMessageBytes = 4096;

[[noreturn]] void stop(const std::string& problem) {
  std::fprintf(stderr, "%s\n", problem.c_str());
  std::abort();
}

Target chosen_target() {
  const char* const wanted = std::getenv("FUZZ_FORMAT");
  std::string known;
  for (const Target& target : parser_targets()) {
    if (wanted != nullptr && target.name == wanted) return target;
    known += " " + target.name;
  }
  stop("expected one of these in FUZZ_FORMAT:" + known);
}

/// Runs an input. Returns the message that it was refused with; empty if it was accepted.
/// Other exceptions than ours end the process.
std::string message_of(const Target& target, const std::string& path,
                       const std::string& input) {
  try {
    target.run(path, input);
    return "";
  } catch (const Error& error) {
    return error.what();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
}

bool is_internal(const std::string& text) {
  return text.find("INTERNAL ASSERT") != std::string::npos;
}

void run(const std::string& input) {
  static const Target target = chosen_target();
  static const std::string path = target.file.empty() ? "" : "./" + target.file;
  if (!path.empty()) std::ofstream(path, std::ios::binary) << input;
  const std::string message = message_of(target, path, input);
  if (message.size() > kMostMessageBytes) stop("a long message: " + message);
  if (is_internal(message) && !is_internal(input)) stop(message);
  if (!message.empty() && message.find(target.named) == std::string::npos) {
    stop("a message without the name of the file: " + message);
  }
}

}  // namespace
}  // namespace reprise::fuzz

// No study is built in.
const std::vector<std::pair<std::string, std::string>>&
reprise::shipped_studies() {
  static const std::vector<std::pair<std::string, std::string>> none;
  return none;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  reprise::fuzz::run({reinterpret_cast<const char*>(bytes), size});
  return 0;
}
