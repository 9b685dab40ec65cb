// Datasets and results.
#include "report/page.h"
#include "target.h"

#include <reprise/data/dataset.h>
#include <reprise/report/report.h>
#include <reprise/study/runner.h>

#include <fstream>

namespace reprise::fuzz {
namespace {

/// Reads the first and the last sample.
void read_some(const Dataset& data) {
  (void)data.description();
  if (data.size() == 0) return;
  (void)data.get({0, data.size() - 1});
  (void)data.count(data.size() - 1);
}

void prepare_labels(const std::string& folder) {
  std::ofstream(folder + "/train-labels-idx1-ubyte", std::ios::binary)
      << std::string("\0\0\x08\x01\0\0\0\x02\x00\x01", 10);
}

void run_idx(const std::string& path, const std::string&) {
  read_some(*open_dataset({.name = path, .classes = 10}));
}

DataOptions token_options(const std::string& path) {
  return {.name = path, .tokens = true, .seq = 4, .vocab = 300};
}

void run_text(const std::string& path, const std::string& input) {
  DataOptions options = token_options(path);
  const size_t way = choice_of(input, 3);
  if (way > 0) {
    options.documents =
        way == 1 ? DocumentMode::kPadded : DocumentMode::kPacked;
    options.document_end = '\n';
  }
  read_some(*open_dataset(options));
}

void run_tokens(const std::string& path, const std::string&) {
  read_some(*open_dataset(token_options(path)));
}

void prepare_page(const std::string& folder) {
  std::ofstream(folder + "/page.html") << detail::kResultsPlaceholder;
}

void run_results(const std::string& path, const std::string&) {
  ReportOptions options;
  options.page = path.substr(0, path.rfind('/')) + "/page.html";
  (void)make_report({path}, options);
}

}  // namespace

std::vector<Target> data_targets() {
  return {
      {.name = "idx",
       .file = "train-images-idx3-ubyte",
       .run = run_idx,
       .prepare = prepare_labels,
       .named = "reprise-fuzz-"},
      {.name = "text", .file = "fuzz.txt", .run = run_text},
      {.name = "tokens16", .file = "fuzz.bin", .run = run_tokens},
      {.name = "tokens32", .file = "fuzz.u32", .run = run_tokens},
      {.name = "results",
       .file = "fuzz.jsonl",
       .run = run_results,
       .prepare = prepare_page},
  };
}

}  // namespace reprise::fuzz
