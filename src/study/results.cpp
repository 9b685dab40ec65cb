#include "base/file.h"

#include <reprise/study/results.h>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <map>
#include <sys/file.h>
#include <unistd.h>

namespace reprise {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kName = "results.jsonl";

std::string reason() {
  return std::strerror(errno);
}

/// Lines that were written to their end.
std::vector<std::string> whole_lines(const std::string& path) {
  const std::string text = read_text(path);
  std::vector<std::string> lines;
  size_t from = 0;
  for (size_t to; (to = text.find('\n', from)) != std::string::npos;) {
    lines.push_back(text.substr(from, to - from));
    from = to + 1;
  }
  return lines;
}

class Collection {
 public:
  void read(const std::string& path) {
    const auto lines = whole_lines(path);
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
    const json object = json::parse(line, nullptr, /*allow_exceptions=*/false);
    TORCH_CHECK(object.is_object() && object.contains("type"), "[results] ",
                path, ", line ", number,
                ": expected an object with a type, got '", line.substr(0, 60),
                "'");
    const json& type = object["type"];
    if (type == "study") {
      studies_.push_back(line);
    } else if (type == "run") {
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
    // Other types are of a later version.
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

ResultsFile::ResultsFile(const std::string& directory)
    : path_((fs::path(directory) / kName).string()) {
  std::error_code error;
  fs::create_directories(directory, error);
  TORCH_CHECK(!error, "[results] cannot make ", directory, ": ",
              error.message());
  file_ = open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  TORCH_CHECK(file_ >= 0, "[results] cannot write ", path_, ": ", reason());
  if (flock(file_, LOCK_EX | LOCK_NB) != 0) {
    close(file_);
    TORCH_CHECK(false, "[results] another process is writing ", path_);
  }
  const std::string text = read_text(path_);
  const size_t end = text.rfind('\n');
  const size_t whole = end == std::string::npos ? 0 : end + 1;
  if (whole < text.size() && ftruncate(file_, static_cast<off_t>(whole)) != 0) {
    const std::string why = reason();
    close(file_);
    TORCH_CHECK(false, "[results] cannot cut the torn last line of ", path_,
                ": ", why);
  }
}

ResultsFile::~ResultsFile() {
  if (file_ >= 0) close(file_);
}

void ResultsFile::append(const std::string& json) {
  TORCH_INTERNAL_ASSERT(json.find('\n') == std::string::npos);
  const std::string line = json + "\n";
  size_t done = 0;
  while (done < line.size()) {
    const ssize_t n = write(file_, line.data() + done, line.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      const std::string why = reason();
      // A part of a line would spoil the next one.
      if (done > 0) {
        const off_t size = lseek(file_, 0, SEEK_END);
        if (ftruncate(file_, size - static_cast<off_t>(done)) != 0) done = 0;
      }
      TORCH_CHECK(false, "[results] cannot write ", path_, ": ", why);
    }
    done += static_cast<size_t>(n);
  }
  TORCH_CHECK(fsync(file_) == 0, "[results] cannot write ", path_, ": ",
              reason());
}

}  // namespace reprise
