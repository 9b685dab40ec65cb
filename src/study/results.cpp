#include "base/append_log.h"
#include "base/file.h"
#include "base/json_text.h"
#include "base/text_check.h"
#include "base/throw_error.h"
#include "study/record_type.h"

#include <reprise/study/runner.h>

#include <c10/util/Exception.h>

#include <filesystem>
#include <map>
#include <memory>

namespace reprise {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kName = "results.jsonl";
constexpr uint64_t kMostResultsBytes = uint64_t{4} << 30;

/// Lines that end with a newline.
std::vector<std::string> complete_lines(const std::string& path) {
  const std::string text = read_text(path, kMostResultsBytes);
  std::vector<std::string> lines;
  size_t from = 0;
  for (size_t to; (to = text.find('\n', from)) != std::string::npos;) {
    lines.push_back(text.substr(from, to - from));
    from = to + 1;
  }
  return lines;
}

/// Objects of several files; a run replaces earlier ones with its id.
class Collection {
 public:
  void read(const std::string& path) {
    const auto lines = complete_lines(path);
    for (size_t i = 0; i < lines.size(); ++i) {
      if (lines[i].empty()) continue;
      add(lines[i], path, i + 1);
    }
  }

  std::vector<std::string> in_order() && {
    std::vector<std::string> all = std::move(studies_);
    for (auto& run : runs_) {
      if (!run.empty()) all.push_back(std::move(run));
    }
    return all;
  }

 private:
  void add(const std::string& line, const std::string& path, size_t number) {
    const json object = parse_json(line);
    TORCH_CHECK(object.is_object() && object.contains("type"), "[results] ",
                path, ", line ", number,
                ": expected an object with a type, got ", in_quotes(line));
    const auto type = detail::record_type(object);
    if (type == detail::RecordType::kStudy) {
      studies_.push_back(line);
    } else if (type == detail::RecordType::kRun) {
      TORCH_CHECK(object.contains("id") && object["id"].is_string(),
                  "[results] ", path, ", line ", number,
                  ": expected a run with an id, got none");
      const auto [at, fresh] =
          places_.emplace(object["id"].get<std::string>(), runs_.size());
      if (!fresh) {
        runs_[at->second].clear();
        at->second = runs_.size();
      }
      runs_.push_back(line);
    }
    // Other types belong to later versions.
  }

  std::vector<std::string> studies_;
  std::vector<std::string> runs_;         // empty: replaced
  std::map<std::string, size_t> places_;  // by id
};

}  // namespace

std::vector<std::string> read_results(const std::vector<std::string>& paths) {
  Collection collection;
  for (const std::string& path : paths) {
    std::error_code error;
    const bool folder = fs::is_directory(path, error);
    const std::string file = folder ? (fs::path(path) / kName).string() : path;
    const bool missing =
        fs::status(file, error).type() == fs::file_type::not_found;
    TORCH_CHECK(!missing, "[results] ", path,
                folder ? " has no results.jsonl" : " is not there");
    collection.read(file);
  }
  return std::move(collection).in_order();
}

ResultsFile::ResultsFile(const std::string& directory) {
  make_directories(directory);
  log_ = std::make_unique<detail::AppendLog>(
      (fs::path(directory) / kName).string(), "results");
  TORCH_CHECK(log_->try_lock(), "[results] another process is writing ",
              log_->path());
  log_->truncate_incomplete_line();
}

ResultsFile::~ResultsFile() = default;

const std::string& ResultsFile::path() const {
  return log_->path();
}

void ResultsFile::append(const std::string& json) {
  TORCH_INTERNAL_ASSERT(json.find('\n') == std::string::npos);
  log_->append(json + "\n");
  log_->sync();
}

}  // namespace reprise
