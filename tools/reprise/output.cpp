#include "output.h"

#include "base/file.h"

#include <csignal>
#include <fcntl.h>
#include <unistd.h>

namespace reprise::command {

void open_standard_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(stream, F_GETFD) >= 0) continue;
    // The lowest number that is free is this one. Standard output cannot be written, so that
    // a lost result is still an error.
    const int flags = stream == STDERR_FILENO ? O_WRONLY : O_RDONLY;
    const int file = open("/dev/null", flags);
    if (file < 0) return;
  }
}

void ignore_output_signals() {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

void print_text(const std::string& text, std::FILE* out) {
  // fmt::print() would throw, and a stream would keep the failed text and fail again.
  std::fflush(out);
  write_all(fileno(out), text.data(), text.size());
}

}  // namespace reprise::command
