// Reads files and texts that are wrong in many ways:
//
//     reprise_fuzz [--format NAME] [--inputs N] [--seconds S] [--seed N] [--first N]
//     reprise_fuzz --format NAME --replay FILE
//
// Without a format, all are run, each with N inputs or for S seconds. A worker process runs the
// inputs; if it dies, the input is written to fuzz-failures/FORMAT-NUMBER, and the next worker
// continues with the next input. Exit status: 0 if no input is a problem.
#include "base/file.h"
#include "base/paths.h"
#include "mutator.h"
#include "target.h"
#include "worker.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <limits>
#include <new>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

namespace reprise::fuzz {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr int kMostFailures = 20;  // of a format

struct Options {
  std::string format;
  std::string replay;
  std::string failures = "fuzz-failures";
  uint64_t inputs = 2000;
  uint64_t first = 0;
  uint64_t seed = 1;
  double seconds = 0;
};

std::vector<Target> all_targets() {
  std::vector<Target> all;
  for (auto* list :
       {tensor_targets, data_targets, text_targets, parser_targets}) {
    for (Target& target : list()) all.push_back(std::move(target));
  }
  return all;
}

std::vector<std::string> corpus_of(const Target& target) {
  std::vector<std::string> paths;
  const std::string folder = std::string(REPRISE_CORPUS) + "/" + target.corpus;
  for (const auto& entry : fs::directory_iterator(folder)) {
    paths.push_back(entry.path().string());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> inputs;
  for (const std::string& path : paths) inputs.push_back(read_text(path));
  return inputs;
}

/// Files of a target, in memory if the system has such a directory.
class Folder {
 public:
  explicit Folder(const Target& target) : parent_(make_parent()) {
    path_ = parent_.path() + "/" + target.name;
    fs::create_directories(path_);
    if (target.prepare) target.prepare(path_);
  }
  const std::string& path() const { return path_; }

 private:
  static std::string make_parent() {
    if (access("/dev/shm", W_OK) == 0) setenv("TMPDIR", "/dev/shm", 0);
    return "reprise-fuzz-";
  }
  TemporaryDirectory parent_;
  std::string path_;
};

std::string why_ended(int status, const Progress& progress) {
  if (WIFEXITED(status) && WEXITSTATUS(status) == kHasProblem) {
    return progress.problem;
  }
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    return signal == SIGALRM ? "hang"
                             : fmt::format("crash: signal {} ({})", signal,
                                           strsignal(signal));
  }
  return fmt::format("crash: exit status {}", WEXITSTATUS(status));
}

/// Runs the inputs of one format. Returns the number of problems.
int run_format(const Target& target, const Options& options, Progress& progress,
               uint64_t& total) {
  const Mutator mutator(corpus_of(target), options.seed,
                        target.has_safetensors_header);
  progress = Progress();
  progress.number = options.first;
  const uint64_t end = options.seconds > 0
                           ? std::numeric_limits<uint64_t>::max()
                           : options.first + options.inputs;
  const auto start = Clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  int failures = 0;
  while (progress.number < end && failures < kMostFailures) {
    const double left = options.seconds > 0 ? options.seconds - seconds() : 0;
    if (options.seconds > 0 && left <= 0) break;
    const Folder folder(target);
    std::cout << std::flush;
    const pid_t child = fork();
    if (child == 0) {
      run_inputs(target, mutator, folder.path(), end, left, progress);
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) break;
    ++failures;
    fs::create_directories(options.failures);
    const std::string file =
        fmt::format("{}/{}-{}-{}", options.failures, target.name, options.seed,
                    progress.number);
    std::ofstream(file, std::ios::binary) << mutator.input(progress.number);
    std::cout << fmt::format(
        "{}: {}\n  replay: reprise_fuzz --format {} "
        "--replay {}\n",
        target.name, why_ended(status, progress), target.name, file);
    std::memset(progress.problem, 0, sizeof progress.problem);
    ++progress.number;
  }
  const uint64_t inputs = progress.number - options.first;
  total += inputs;
  std::cout << fmt::format(
      "{:<14}{:>10} inputs  {:>9} accepted  {:>9} refused  {:>3} problems  "
      "{:>6.1f} s\n",
      target.name, inputs, progress.accepted, progress.refused, failures,
      seconds());
  return failures;
}

int replay(const Target& target, const Options& options, Progress& progress) {
  const Folder folder(target);
  const std::string input = read_text(options.replay);
  const pid_t child = fork();
  if (child == 0) {
    const std::string message =
        run_input(target, folder.path(), input, progress);
    std::cout << (message.empty() ? "accepted" : "refused: " + message)
              << std::endl;
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return 0;
  std::cout << why_ended(status, progress) << "\n";
  return 1;
}

bool parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (i + 1 == argc) return false;
    const std::string value = argv[++i];
    if (flag == "--format") {
      options.format = value;
    } else if (flag == "--replay") {
      options.replay = value;
    } else if (flag == "--failures") {
      options.failures = value;
    } else if (flag == "--inputs") {
      options.inputs = std::stoull(value);
    } else if (flag == "--first") {
      options.first = std::stoull(value);
    } else if (flag == "--seed") {
      options.seed = std::stoull(value);
    } else if (flag == "--seconds") {
      options.seconds = std::stod(value);
    } else {
      return false;
    }
  }
  return options.replay.empty() || !options.format.empty();
}

int run(const Options& options) {
  void* const memory = mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto& progress = *new (memory) Progress();
  int problems = 0, formats = 0;
  uint64_t total = 0;
  for (const Target& target : all_targets()) {
    if (!options.format.empty() && options.format != target.name) continue;
    ++formats;
    if (!options.replay.empty()) return replay(target, options, progress);
    problems += run_format(target, options, progress, total);
  }
  if (formats == 0) {
    std::cerr << "no format " << options.format << "\n";
    return 2;
  }
  std::cout << fmt::format("{} inputs of {} formats, {} problems\n", total,
                           formats, problems);
  return problems > 0 ? 1 : 0;
}

}  // namespace
}  // namespace reprise::fuzz

int main(int argc, char** argv) {
  reprise::fuzz::Options options;
  if (!reprise::fuzz::parse(argc, argv, options)) {
    std::cerr << "usage: reprise_fuzz [--format NAME] [--inputs N | --seconds "
                 "S] [--seed N] [--first N] [--failures DIR] [--replay FILE]\n";
    return 2;
  }
  return reprise::fuzz::run(options);
}
