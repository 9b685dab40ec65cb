// Runs many commands in one process, each in a fork: loading LibTorch takes most of the time
// of a command that ends with an error. For wrong_inputs_test.py.
//
// A request on standard input is the number of arguments, and for each its length in bytes, a
// space and the bytes; numbers end with a newline or a space. The answer is the exit status and
// the length of what the command wrote to standard error, then those bytes.
#include <reprise/command.h>

#include <cstdlib>
#include <fcntl.h>
#include <iostream>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace {

[[noreturn]] void run_in_child(std::vector<std::string> arguments, int errors) {
  const int null = open("/dev/null", O_RDWR);
  dup2(null, STDIN_FILENO);
  dup2(null, STDOUT_FILENO);
  dup2(errors, STDERR_FILENO);
  std::vector<char*> words;
  for (std::string& argument : arguments) words.push_back(argument.data());
  words.push_back(nullptr);
  std::exit(
      reprise::run_command(static_cast<int>(arguments.size()), words.data()));
}

std::string read_all(int from) {
  std::string text;
  char part[4096];
  ssize_t count = 0;
  while ((count = read(from, part, sizeof part)) > 0) {
    text.append(part, static_cast<size_t>(count));
  }
  return text;
}

}  // namespace

int main() {
  size_t count = 0;
  while (std::cin >> count) {
    std::vector<std::string> arguments(count);
    for (std::string& argument : arguments) {
      size_t length = 0;
      std::cin >> length;
      std::cin.get();
      argument.resize(length);
      std::cin.read(argument.data(), static_cast<std::streamsize>(length));
    }
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return 1;
    const pid_t child = fork();
    if (child < 0) return 1;
    if (child == 0) run_in_child(std::move(arguments), ends[1]);
    close(ends[1]);
    const std::string text = read_all(ends[0]);
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    const int code =
        WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    std::cout << code << ' ' << text.size() << '\n' << text << std::flush;
  }
  return 0;
}
